"""Files that are mapped into memory: nobody may shorten them while they are read."""

from pathlib import Path
from typing import NamedTuple

from phalanx.core.errors import DataError


class MappedFile(NamedTuple):
    """A file as it was when it was opened.

    The system ends a process, without a word, that reads where a mapped file no longer is; so its
    size is looked at before.

    Attributes:
        path: of the file.
        identity: device and number of the file, whatever its name.
        bytes: its size.
    """

    path: Path
    identity: tuple[int, int]
    bytes: int

    @classmethod
    def of(cls, path: Path) -> "MappedFile":
        """The file at `path`, as it is now.

        Raises:
            OSError: there is none.
        """
        status = path.stat()
        return cls(path, (status.st_dev, status.st_ino), status.st_size)

    def require_whole(self) -> None:
        """Stop if the file was cut short since it was opened.

        A file that was replaced or deleted is still mapped as it was, so that does no harm.

        Raises:
            DataError: naming the file.
        """
        try:
            now = MappedFile.of(self.path)
        except OSError:
            return
        if now.identity == self.identity and now.bytes < self.bytes:
            raise DataError(
                f"{self.path} was cut short while it was read: it had {self.bytes:,} bytes and has "
                f"{now.bytes:,}; write a corpus to another file, then rename it, and resume"
            )
