"""Local sockets need short paths, wherever temporary files are."""

import multiprocessing.util
import os
import tempfile
from pathlib import Path

# A path of a socket has at most 107 bytes; multiprocessing adds `/pymp-12345678/listener-12345678`.
LONGEST = 107 - 32
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # a folder of our own is made there


def keep_socket_paths_short() -> None:
    """Let multiprocessing make its private folder where the paths in it are short enough.

    A batch system may set TMPDIR to something long. All else goes on to be written there.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST:
        return
    for folder in SHORT_FOLDERS:
        if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = folder
            try:
                multiprocessing.util.get_temp_dir()  # made once, and remembered
            finally:
                tempfile.tempdir = usual
            return
