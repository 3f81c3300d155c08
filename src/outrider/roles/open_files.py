"""The limit of open files: every connection is one, and shells commonly allow 1,024."""

import sys

_FILES = 65_536


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as the machine lets it, up to 65,536."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
