"""The folder for temporary files among which are sockets: their paths are short, and Ray reads them as ASCII."""

import logging
import os
import tempfile

logger = logging.getLogger(__name__)


def socket_folder(max_bytes: int, purpose: str, variable: str = "TMPDIR") -> str:
    """Return the folder that `variable` names, the usual temporary one without it, or /tmp if sockets cannot be there.

    max_bytes  of its path; a socket's whole path has 107 at most
    purpose    what is put there, for the warning about /tmp
    """
    name = variable if os.environ.get(variable) else "TMPDIR"
    folder = os.environ.get(variable) or tempfile.gettempdir()
    size = len(os.fsencode(folder))
    if size > max_bytes:
        why = f"sockets leave it at most {max_bytes} characters, it has {size}"
    elif not folder.isascii() or any(character.isspace() for character in folder):
        why = "paths of sockets are ASCII without white space"
    else:
        return folder
    logger.warning("%s=%s is not used: %s; %s in /tmp", name, folder, why, purpose)
    return "/tmp"
