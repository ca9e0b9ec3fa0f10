"""What a machine of a cloud does when it starts: user data for cloud-init.

Pure: settings in, text out. The machine ends itself after its time whatever else goes
wrong, installs one release and checks its digest, and says on its console that the
site is ready, or what failed; ``ComputePool.log`` shows that. A wheel of ``make dist``
names the files of its dependencies by their digests, so its own pins them, too. There
are no secrets in it, since every program on the machine can read it.

The machine enrols by its cloud identity, and starts when the operator of the sites has
signed whom it may trust.

Source: cloud-init's documentation, "Module reference".
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from cloud_adapters.compute.pool import NodeSpec

FAILED = "the site was not started"
READY = "site: it is ready"
_OURS = "crossfed: "
# What an agent logs; a pod runs nothing else that could say so.
_CONNECTED = re.compile(r"\bconnected to \S+ as node ")
_SHOWN = 2000

# What EC2 takes.
MAX_BYTES = 16 << 10
# After a failure, so that someone can look; the machine costs money meanwhile.
_MINUTES_LEFT = 5
_FOLDER = "/var/lib/crossfed-site"
# Of objects that the site's data is read from: it may go with the machine.
_CACHE = "/var/cache/crossfed-site"
_SETTINGS = "/etc/crossfed/site.toml"
_SCRIPT = "/usr/local/sbin/crossfed-start"
_UNIT, _ENROL_UNIT = "crossfed-site.service", "crossfed-enrol.service"
_UNITS = "/etc/systemd/system"
_NVIDIA, _GPU_DEVICES = "nvidia.conf", "--device nvidia.com/gpu=all"
_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)(\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})")
_CONTAINERS_UNIT = """\
[Unit]
Description=crossfed site agent
Wants=network-online.target
After=network-online.target

[Service]
# As user 10001 of the image, which owns the only folders that it can write to.
ExecStart=/usr/bin/podman run --rm --name crossfed-site --read-only --tmpfs /tmp \
--cap-drop all --security-opt no-new-privileges --stop-timeout 30 {gpus}\
--network host -v {folder}:/var/lib/crossfed/site \
-v {cache}:/var/cache/crossfed -e CROSSFED_CACHE_DIR=/var/cache/crossfed {image}
Restart=always
RestartSec=5s
RestartPreventExitStatus=2
TimeoutStopSec=45s
# Of podman, which has to be root; the container itself is closed off above.
PrivateTmp=yes
ProtectClock=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
LockPersonality=yes
RestrictRealtime=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""
# It has no token of a person: its cloud vouches for it, for as long as it takes.
_ENROL_DROP_IN = """\
[Unit]
ConditionPathExists=
ConditionPathExists=!{folder}/roster.toml

[Service]
StandardInput=null
ExecStart=
ExecStart={command}
TimeoutStartSec=infinity
"""
_CACHE_DROP_IN = """\
[Service]
CacheDirectory=crossfed-site
CacheDirectoryMode=0700
Environment=CROSSFED_CACHE_DIR={folder}
"""
# Disks that belong to the host and are empty when a machine starts.
_MOUNT_CACHE = """\
install -d -m 700 {folder}
for disk in /dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_* \\
        /dev/disk/by-id/google-local-nvme-ssd-*; do
    [ -b "$disk" ] || continue
    if blkid --probe "$disk" > /dev/null; then continue; fi
    mkfs.ext4 -q "$disk"
    mount --options nodev,nosuid,noexec "$disk" {folder}
    break
done
chown {owner} {folder}
chmod 700 {folder}"""
_CHECK_GPUS = """\
gpus=$(nvidia-smi --list-gpus | grep --count '^GPU ' || true)
[ "$gpus" -ge {wanted} ] || {{
    tell "$gpus GPUs are visible, {wanted} are paid for:" \\
        "machine.image needs NVIDIA's driver"
    false
}}"""
# Networks of deployments let out TLS alone, and mirrors of images are on port 80: the
# same ones serve TLS, but for those of a region, whose packages are the archive's.
_PACKAGES = """\
if ! {{ {present}; }} > /dev/null 2>&1; then
    find /etc/apt -type f \\( -name '*.list' -o -name '*.sources' \\) \\
        -exec sed --in-place --regexp-extended {over_tls} {{}} +
    export DEBIAN_FRONTEND=noninteractive
    apt-get --quiet --option Acquire::Retries=5 update
    apt-get --quiet --option DPkg::Lock::Timeout=300 install --yes {packages}
fi"""
_OVER_TLS = shlex.quote(
    r"s#http://([a-z0-9.-]+\.)?((archive|security)\.ubuntu\.com)#https://\2#g; "
    r"s#http://([a-z0-9-]+\.)?((deb|security)\.debian\.org)#https://\2#g"
)
_AWAIT_CONTAINER = """\
for _ in $(seq 36); do
    systemctl is-active --quiet {unit} || {{
        journalctl --unit {unit} --lines 5 --output cat > /dev/console
        false
    }}
    podman healthcheck run crossfed-site > /dev/null 2>&1 && break
    sleep 5
done"""
_HEAD = """\
#!/bin/bash
# Written by crossfed: installs a site and starts it.
set -euo pipefail
tell() {{ echo "crossfed: $*" | tee /dev/console; }}
failed() {{
    tell "{failed}: line $1 of {script} failed;" \\
        "this machine ends in {minutes} minutes"
    shutdown --poweroff +{minutes}
}}
trap 'failed $LINENO' ERR
"""
_ASK_GOOGLE = (
    "curl --fail --silent --header 'Metadata-Flavor: Google' "
    "'http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/"
    "default/token' | python3 -c 'import json, sys; "
    'print(json.load(sys.stdin)["access_token"])\''
)
# Of clouds: machines sign in by who they are. The file goes when the image is there.
_ECR = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com")
_SIGNED_IN = "/run/crossfed-registry.json"
_FETCH = {
    "https": "curl --fail --silent --show-error --location --proto '=https' --retry 5 "
    "--output {file} {url}",
    "gs": f"token=$({_ASK_GOOGLE})\n"
    'echo "Authorization: Bearer $token" | '
    "curl --fail --silent --show-error --header @- --output {file} {url}",
    "s3": "/opt/crossfed/bin/pip install --quiet 'boto3>=1.44'\n"
    "/opt/crossfed/bin/python -c 'import boto3, sys; "
    'boto3.client("s3").download_file(*sys.argv[1:])\' {url} {file}',
}


def has_failed(log: str) -> bool:
    """Whether a console says that the machine's site could not be started."""
    return f"{_OURS}{FAILED}" in log


def is_ready(log: str) -> bool:
    """Whether a console says that the machine's site has started."""
    return f"{_OURS}{READY}" in log or _CONNECTED.search(log) is not None


def end_of(log: str) -> str:
    """The last lines of a console, for a message."""
    shown = log[-_SHOWN:]
    if len(shown) < len(log):  # Its first line may begin in the middle.
        shown = shown.partition("\n")[2] or shown
    return shown.strip() or "(no line of it was kept)"


def is_pinned(image: str) -> bool:
    """Whether a container image is named by its digest."""
    return re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", image) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a machine installs: a wheel, or a container image.

    Attributes:
        wheel: URL of the wheel: ``https://``, ``s3://BUCKET/KEY`` or
            ``gs://BUCKET/KEY``, which the machine's own identity may read.
        sha256: Digest of the wheel, 64 hexadecimal digits.
        extras: Extras of crossfed to install with it.
        image: Container image of a site with its digest, ``NAME@sha256:...``, instead
            of a wheel.
    """

    wheel: str = ""
    sha256: str = ""
    extras: tuple[str, ...] = ("flower",)
    image: str = ""

    def __post_init__(self) -> None:
        """Check that one of the two is there, and pinned.

        Raises:
            ValueError: It is not.
        """
        if bool(self.wheel) is bool(self.image):
            raise ValueError("a release is a wheel or an image, and not both")
        if self.image and not is_pinned(self.image):
            raise ValueError(
                f"{self.image!r} names no digest: use NAME@sha256:..., since what a "
                "name means can change"
            )
        if self.image:
            return
        url = urlsplit(self.wheel)
        if url.scheme not in _FETCH or not url.path.endswith(".whl"):
            raise ValueError(f"{self.wheel!r} is no wheel at https://, s3:// or gs://")
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"{self.sha256!r} is no SHA-256 of 64 hexadecimal digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineInvitation:
    """How a machine enrols; nothing in it is secret.

    Attributes:
        token: Names the aggregator and the site.
        organisation: Who answers for the site, in words.
        platform: Cloud that vouches for it.
        region: On AWS, the region whose STS confirms it.
    """

    token: str
    organisation: str
    platform: str
    region: str = ""

    def words(self, folder: str) -> list[str]:
        """Arguments of ``crossfed`` that enrol the machine in a folder."""
        region = ["--region", self.region] if self.region else []
        return [
            *("enroll", self.token, "--platform", self.platform, *region),
            *("--folder", folder, "--organisation", self.organisation),
        ]


def render(
    spec: NodeSpec,
    release: Release,
    site_toml: str,
    units: Mapping[str, str],
    invitation: MachineInvitation,
) -> str:
    """Write the user data of a site's machine.

    Args:
        spec: The machine; ``max_seconds`` and ``name`` count here.
        release: What it installs.
        site_toml: Its configuration, without secrets.
        units: Files of ``deploy/systemd`` by their names, for a wheel; ``nvidia.conf``
            is used on a machine with GPUs.
        invitation: How it enrols.

    Raises:
        ValueError: It is larger than clouds take.
    """
    files = _files(spec, release, site_toml, units, invitation)
    document = {
        "hostname": re.sub("[^a-z0-9-]+", "-", spec.name.lower())[:63].strip("-"),
        # Before all else, and at every start. It must not wait for systemd, which
        # waits for cloud-init at this point.
        "bootcmd": [
            [
                "systemd-run",
                "--no-block",
                "--unit=crossfed-deadline",
                f"--on-boot={round(spec.max_seconds)}s",
                "--timer-property=AccuracySec=1s",
                "/usr/sbin/shutdown",
                "--poweroff",
                "now",
            ]
        ],
        "write_files": [
            {"path": path, "content": text, "permissions": mode}
            for path, (text, mode) in files.items()
        ],
        "runcmd": [[_SCRIPT]],
    }
    # JSON is YAML, except that YAML reads a pair of escapes as two characters.
    body = _PAIR.sub(
        lambda found: found[1] + json.loads(f'"{found[2]}"'),
        json.dumps(document, indent=1),
    )
    text = f"#cloud-config\n{body}\n"
    size = len(text.encode())
    if size > MAX_BYTES:
        raise ValueError(
            f"the user data has {size} bytes, and clouds take {MAX_BYTES}: shorten the "
            "site's tables in the deployment file"
        )
    return text


def _files(
    spec: NodeSpec,
    release: Release,
    site_toml: str,
    units: Mapping[str, str],
    invitation: MachineInvitation,
) -> Mapping[str, tuple[str, str]]:
    """Texts and modes of the files of a machine, by their paths."""
    script = _script(release, invitation, spec.gpus)
    files = {_SCRIPT: (script, "0755"), _SETTINGS: (site_toml, "0644")}
    if release.image:
        text = _CONTAINERS_UNIT.format(
            folder=_FOLDER,
            cache=_CACHE,
            gpus=f"{_GPU_DEVICES} " if spec.gpus else "",
            image=release.image,
        )
        files[f"{_UNITS}/{_UNIT}"] = (text, "0644")
    else:
        for name, text in units.items():
            if name != _NVIDIA or spec.gpus:
                files[_place(name)] = (text, "0644")
        text = _CACHE_DROP_IN.format(folder=_CACHE)
        files[f"{_UNITS}/{_UNIT}.d/cache.conf"] = (text, "0644")
        words = ["/opt/crossfed/bin/crossfed", *invitation.words(_FOLDER)]
        command = " ".join(map(_unit_word, words))
        text = _ENROL_DROP_IN.format(folder=_FOLDER, command=command)
        files[f"{_UNITS}/{_ENROL_UNIT}.d/machine.conf"] = (text, "0644")
    return files


def _unit_word(word: str) -> str:
    """A word of a command as systemd reads it: it knows quotes, % and $."""
    if re.fullmatch(r"[A-Za-z0-9_@:,./=+-]+", word):
        return word
    for character in ("\\", '"', "%", "$"):
        twice = character if character in "%$" else "\\"
        word = word.replace(character, f"{twice}{character}")
    return f'"{word}"'


def _place(name: str) -> str:
    """Where a file of ``deploy/systemd`` is installed."""
    if name == _NVIDIA:
        return f"{_UNITS}/{_UNIT}.d/{name}"
    if name.endswith(".sysusers.conf"):
        return f"/usr/lib/sysusers.d/{name.replace('.sysusers', '')}"
    return f"{_UNITS}/{name}"


def _script(release: Release, invitation: MachineInvitation, gpus: int) -> str:
    head = _HEAD.format(script=_SCRIPT, minutes=_MINUTES_LEFT, failed=FAILED)
    # Before anything is downloaded: without its GPUs, the machine is of no use.
    first = [_CHECK_GPUS.format(wanted=gpus)] if gpus else []
    if release.image:
        present, packages = "command -v podman", "podman"
        if _ECR.match(release.image):
            present += " && command -v docker-credential-ecr-login"
            packages += " amazon-ecr-credential-helper"
        steps = _image_steps(release, invitation, gpus)
    else:
        present = "command -v curl && python3 -c 'import ensurepip'"
        packages = "curl python3-venv"
        steps = _wheel_steps(release)
    first.append(
        _PACKAGES.format(present=present, packages=packages, over_tls=_OVER_TLS)
    )
    last = [
        "systemctl daemon-reload",
        # The unit of a wheel starts when the site reports that it is ready.
        f"systemctl enable --now {_UNIT}",
        *([_AWAIT_CONTAINER.format(unit=_UNIT)] if release.image else []),
        f"tell '{READY}'",
    ]
    return head + "\n".join([*first, *steps, *last]) + "\n"


def _image_steps(
    release: Release, invitation: MachineInvitation, gpus: int
) -> list[str]:
    # In the machine's own network: the metadata service does not answer other networks.
    run = (
        "podman run --rm --read-only --tmpfs /tmp --cap-drop all --network host "
        f"--security-opt no-new-privileges -v {_FOLDER}:/var/lib/crossfed/site"
    )
    words = invitation.words("/var/lib/crossfed/site")
    return [
        *_pull(release.image),
        *(["nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"] if gpus else []),
        f"install -d -m 700 -o 10001 -g 10001 {_FOLDER}",
        _MOUNT_CACHE.format(folder=_CACHE, owner="10001:10001"),
        f"install -m 600 -o 10001 -g 10001 {_SETTINGS} {_FOLDER}/site.toml",
        "tell 'site: it enrols'",
        f"{run} {shlex.quote(release.image)} {shlex.join(words)}",
    ]


def _pull(image: str) -> list[str]:
    """Fetch an image; from a private registry of the machine's own cloud, too."""
    host, pull = image.partition("/")[0], f"podman pull {shlex.quote(image)}"
    if _ECR.fullmatch(host):
        helpers = json.dumps({"credHelpers": {host: "ecr-login"}})
        sign_in = f"echo {shlex.quote(helpers)} > {_SIGNED_IN}"
    elif host.endswith((".pkg.dev", "gcr.io")):
        sign_in = f"{_ASK_GOOGLE} | podman login --authfile {_SIGNED_IN} "
        sign_in += f"--username oauth2accesstoken --password-stdin {host}"
    else:
        return [pull]
    return [sign_in, f"{pull} --authfile {_SIGNED_IN}", f"rm {_SIGNED_IN}"]


def _wheel_steps(release: Release) -> list[str]:
    url = urlsplit(release.wheel)
    name = url.path.rpartition("/")[2]
    file = shlex.quote(f"/var/tmp/{name}")  # noqa: S108 -- of a new machine's root
    source = shlex.quote(release.wheel)
    if url.scheme == "s3":
        source = shlex.join([url.netloc, url.path.lstrip("/")])
    elif url.scheme == "gs":
        place = f"b/{url.netloc}/o/{quote(url.path.lstrip('/'), safe='')}?alt=media"
        source = shlex.quote(f"https://storage.googleapis.com/storage/v1/{place}")
    check = f"printf '%s  %s\\n' {release.sha256} {file}"
    unpacked = "/var/tmp/crossfed"  # noqa: S108 -- of a new machine's root
    files = [f"{unpacked}/crossfed/requirements/{x}.txt" for x in release.extras]
    files.insert(0, f"{unpacked}/crossfed/requirements/base.txt")
    pinned = shlex.join(word for each in files for word in ("--requirement", each))
    pip = "/opt/crossfed/bin/pip install --quiet"
    owned = "-o crossfed-site -g crossfed-site"
    return [
        "systemd-sysusers",
        "python3 -m venv /opt/crossfed",
        _FETCH[url.scheme].format(file=file, url=source),
        f"{check} | sha256sum --check --quiet --strict",
        f"/opt/crossfed/bin/python -m zipfile --extract {file} {unpacked}",
        # Not from source archives, whose own needs nobody has pinned.
        f"{pip} --only-binary :all: --require-hashes {pinned}",
        f"{pip} --no-deps {file}",
        _MOUNT_CACHE.format(folder=_CACHE, owner="crossfed-site:crossfed-site"),
        f"install -d -m 700 {owned} {_FOLDER}",
        f"install -m 600 {owned} {_SETTINGS} {_FOLDER}/site.toml",
        "systemctl daemon-reload",
        "tell 'site: it enrols'",
        f"systemctl start {_ENROL_UNIT}",
    ]
