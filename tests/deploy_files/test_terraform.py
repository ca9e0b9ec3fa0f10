"""The modules of deploy/terraform: checked, computed, applied on a simulated AWS."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.deployment import wait_for
from support.programs import needs, program

from cloud_adapters.identity import aws_policies, gcp_policies
from cloud_adapters.net.ports import free_port

ROOT = Path(__file__).parents[2]
MODULES = Path("deploy") / "terraform"
EXAMPLE = MODULES / "examples" / "two-clouds"
IAM = Path("cloud_adapters") / "identity" / "iam"
NO_CHANGES, CHANGES = 0, 2
SERVICES = ("ec2", "iam", "kms", "s3", "sts")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("terraform"),
]

# The modules of AWS as the example wires them, for a service on this machine. It knows
# no subscribers of budgets, so that module is computed alone.
ON_THIS_MACHINE = """
terraform {{
  required_providers {{
    aws = {{
      source = "hashicorp/aws"
    }}
  }}
}}

provider "aws" {{
  region                      = "us-east-1"
  access_key                  = "test"
  secret_key                  = "test"
  s3_use_path_style           = true
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = false
  max_retries                 = 1
  endpoints {{
    {endpoints}
  }}
}}

module "network" {{
  source = "../deploy/terraform/aws/network"
  name   = "federation"
  zones  = ["us-east-1a", "us-east-1b"]
}}

module "exchange" {{
  source        = "../deploy/terraform/aws/exchange"
  bucket        = "federation-exchange"
  expire_prefix = "exchange/"
}}

module "site" {{
  source  = "../deploy/terraform/aws/party"
  name    = "federation-site"
  reads   = ["federation-exchange/exchange/model"]
  writes  = "federation-exchange/exchange/sites/a"
  kms_key = module.exchange.kms_key
}}

module "google" {{
  source          = "../deploy/terraform/aws/party"
  name            = "federation-google"
  writes          = "federation-exchange/exchange/sites/b"
  trusts_machines = false
  trusts_google   = "112233445566778899000"
}}

module "nodes" {{
  source           = "../deploy/terraform/aws/nodes"
  name             = "federation-site"
  image            = "ami-0123456789abcdef0"
  instance_type    = "g6.xlarge"
  spot             = true
  instance_profile = module.site.instance_profile
  security_group   = module.network.site_security_group
}}

output "kms_key" {{
  value = module.exchange.kms_key
}}
"""


OF_GOOGLE = """
mock_provider "google" {{}}
mock_provider "aws" {{}}
run "ours" {{
  command = plan
  module {{
    source = "../../gcp/party"
  }}
  variables {{
    name        = "crossfed-site"
    project     = "example-project"
    role_suffix = "site"
    reads       = ["bucket/data/v 1"]
    writes      = "bucket/sites/a"
  }}
{checks}
}}
"""


def terraform(folder: Path, *arguments: str, code: int = 0) -> str:
    command = ["terraform", f"-chdir={folder}", *arguments]
    environment = {**os.environ, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


def prepared(folder: Path) -> Path:
    """A folder whose providers are there; without them, the test is skipped."""
    try:
        terraform(folder, "init", "-backend=false", "-input=false", "-no-color")
    except AssertionError as error:
        if "Failed to query available provider packages" in str(error):
            pytest.skip("the providers are neither in a mirror nor reachable")
        raise
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the modules consist of, so that nothing is left in the repository."""
    for folder in (MODULES, IAM):
        ignored = shutil.ignore_patterns(".terraform*", "*.tfstate*")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    return tmp_path


def test_format():
    terraform(ROOT / MODULES, "fmt", "-check", "-recursive")


def test_every_module_is_valid_and_both_clouds_are_wired(tree: Path):
    """Its own tests: trust both ways, refused inputs, pools that start empty."""
    example = prepared(tree / EXAMPLE)
    terraform(example, "validate")
    said = terraform(example, "test", "-no-color")
    assert "7 passed, 0 failed" in said
    made = json.loads((example / ".terraform" / "modules" / "modules.json").read_text())
    used = {(example / each["Dir"]).resolve() for each in made["Modules"]}
    modules = {file.parent for file in (tree / MODULES).glob("*/*/versions.tf")}
    assert {path.resolve() for path in modules} <= used


def test_checkov_finds_nothing(tree: Path):
    """Or the module says at that place why it is so."""
    options = ("--skip-download", "--quiet", "--compact", "--framework", "terraform")
    done = subprocess.run(
        [program("checkov"), *options, "--directory", tree / MODULES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[str]:
    """A simulated AWS of this test's own; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (tmp_path / "moto.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(url), "the simulated AWS answers", 60)
        yield url
    finally:
        server.kill()
        server.wait()


def _answers(url: str) -> bool:
    try:
        client(url, "s3").list_buckets()
    except Exception:  # noqa: BLE001 (not yet)
        return False
    return True


def client(url: str, service: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106
    )


def statements(policy: str | dict[str, Any]) -> list[dict[str, Any]]:
    """In one form: a list of actions, and no empty condition."""
    document = json.loads(policy) if isinstance(policy, str) else policy
    found = []
    for one in document["Statement"]:
        actions = one["Action"] if isinstance(one["Action"], list) else [one["Action"]]
        whole = {**one, "Action": sorted(actions)}
        found.append({key: value for key, value in whole.items() if value != {}})
    return found


def test_aws_is_made_unmade_and_as_our_policies_say(tree: Path, aws: str):
    """The second plan is empty, the rights are those of aws_policies, and all ends."""
    root = tree / "root"
    root.mkdir()
    endpoints = "\n    ".join(f'{name} = "{aws}"' for name in SERVICES)
    (root / "main.tf").write_text(ON_THIS_MACHINE.format(endpoints=endpoints))
    prepared(root)
    terraform(root, "apply", "-auto-approve", "-input=false", "-no-color")
    plan = ("plan", "-detailed-exitcode", "-input=false", "-no-color")
    terraform(root, *plan, code=NO_CHANGES)

    key = json.loads(terraform(root, "output", "-json", "kms_key"))
    iam, s3, ec2 = (client(aws, name) for name in ("iam", "s3", "ec2"))
    made = iam.get_role_policy(RoleName="federation-site", PolicyName="stores")
    parse = aws_policies.parse_place
    wanted = aws_policies.site_policy(
        reads=[parse("s3://federation-exchange/exchange/model")],
        writes=parse("s3://federation-exchange/exchange/sites/a"),
        kms_key=key,
    )
    assert statements(made["PolicyDocument"]) == statements(wanted)
    bucket = s3.get_bucket_policy(Bucket="federation-exchange")["Policy"]
    place = parse("s3://federation-exchange/exchange")
    assert statements(bucket) == statements(aws_policies.bucket_policy(place))
    (parts, _) = s3.get_bucket_lifecycle_configuration(Bucket="federation-exchange")[
        "Rules"
    ]
    (ours,) = json.loads(aws_policies.bucket_lifecycle())["Rules"]
    same = ("ID", "Status", "AbortIncompleteMultipartUpload")
    assert [parts[name] for name in same] == [ours[name] for name in same]
    named = [{"Name": "group-name", "Values": ["federation-site"]}]
    (group,) = ec2.describe_security_groups(Filters=named)["SecurityGroups"]
    assert group["IpPermissions"] == []

    terraform(root, "destroy", "-auto-approve", "-input=false", "-no-color")
    assert s3.list_buckets()["Buckets"] == []
    assert [r["RoleName"] for r in iam.list_roles()["Roles"]] == []
    assert ec2.describe_nat_gateways()["NatGateways"] in ([], [*_deleted(ec2)])
    assert ec2.describe_launch_templates()["LaunchTemplates"] == []


def _deleted(ec2: Any) -> list[dict[str, Any]]:
    """NAT gateways that AWS still lists some time after their end."""
    found = ec2.describe_nat_gateways()["NatGateways"]
    return [one for one in found if one["State"] == "deleted"]


def test_conditions_of_google_cloud_are_ours(tree: Path):
    """The example's plan binds each role to the prefixes that gcp_policies says."""
    example = tree / EXAMPLE
    (example / "tests" / "two_clouds.tftest.hcl").unlink()
    place = gcp_policies.parse_place("gs://bucket/data/v 1")
    wanted = json.loads(gcp_policies.condition(place))
    permissions = {
        kind: json.loads(gcp_policies.role(kind))["includedPermissions"]
        for kind in ("read", "write")
    }
    bound = (
        f"google_storage_bucket_iam_member.this[{json.dumps('read bucket/data/v 1')}]"
    )
    role = 'google_project_iam_custom_role.this["write"].permissions'
    equal = {
        f"{bound}.condition[0].expression": json.dumps(wanted["expression"]),
        f"{bound}.condition[0].title": json.dumps(wanted["title"]),
        f"sort({role})": f"sort({json.dumps(permissions['write'])})",
    }
    checks = "".join(
        f'assert {{\ncondition = {found} == {ours}\nerror_message = "differs"\n}}\n'
        for found, ours in equal.items()
    )
    test = example / "tests" / "ours.tftest.hcl"
    test.write_text(OF_GOOGLE.format(checks=checks))
    assert "1 passed, 0 failed" in terraform(prepared(example), "test", "-no-color")
