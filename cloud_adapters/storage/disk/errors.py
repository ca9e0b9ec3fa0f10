"""What the system's errors mean for objects in a folder."""

import errno
from collections.abc import Mapping

# Reading a path that is not the store's finds nothing.
NOTHING_THERE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG}
)

ADVICE: Mapping[int, str] = {
    errno.ENOSPC: "the disk is full; free some space, and resume the run if it has "
    "ended",
    errno.EDQUOT: "the disk quota is used up; free some space, and resume the run if "
    "it has ended",
    errno.EFBIG: "the file would be larger than the process or the file system "
    "allows; raise the limit (ulimit -f) or use another disk",
    errno.EACCES: "permission is denied; make the folder writable for this user or "
    "choose another storage.url",
    errno.EPERM: "the operation is not permitted; the folder is protected, or its "
    "file system has no hard links: choose another storage.url",
    errno.EROFS: "the file system is read-only; mount it writable or choose another "
    "storage.url",
    errno.ELOOP: (
        "a symbolic link is in the way of a folder; move it or choose another "
        "storage.url"
    ),
    errno.ENOTDIR: (
        "a file or a symbolic link is in the way of a folder; move it or choose "
        "another storage.url"
    ),
    errno.EISDIR: "a folder is in the way; move it",
    errno.ENOENT: (
        "its folder was removed while it was being written; do not change the store's "
        "folder during a run"
    ),
    errno.EXDEV: "a folder of the store is on another file system; keep the whole "
    "store on one",
    errno.ENAMETOOLONG: "a part of it is longer than the file system allows; choose "
    "shorter names",
    errno.EMFILE: "this process has too many open files; raise the limit (ulimit -n)",
    errno.EIO: "the disk reports an error; check its health before you continue",
}
