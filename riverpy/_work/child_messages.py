"""Messages between a worker and its child processes. They use two pipes that carry nothing else.

A message consists of the length of its content, one byte for its type, and its content.
"""

from __future__ import annotations

import struct
from typing import IO

RUN_JOB = b"J"
"""To the child: run a job. The content is the function, the row and the args, pickled."""
CHECK_FUNCTIONS = b"K"
"""To the child: import functions. The content is a list of pickled functions, pickled."""
CANCEL_JOB = b"C"
"""To the child: set `job.cancelled` of the running job."""
CHILD_STARTED = b"P"
"""From the child, as its first message: its process id in decimal digits."""
CHILD_READY = b"R"
"""From the child, once: it has imported the worker's main module."""
CHILD_REFUSED = b"E"
"""From the child, instead of CHILD_READY: the child cannot run jobs. The content is the reason."""
JOB_STARTED = b"S"
"""From the child: the job has been unpickled and starts now. CANCEL_JOB may follow."""
METADATA_RECORDED = b"M"
"""From the child: a metadata key of the running job and its value as JSON text, pickled."""
PROGRESS_REPORTED = b"T"
"""From the child: the newest progress of the running job, as JSON text."""
JOB_ENDED = b"F"
"""From the child: the raised error or None, pickled."""
FUNCTIONS_CHECKED = b"L"
"""From the child: a list with the text of an error, or None, for each checked function, pickled."""
_MESSAGE_LENGTH_FORMAT = struct.Struct("!Q")


def send_message(pipe: IO[bytes], kind: bytes, content: bytes = b"") -> None:
    """Send a message. `kind` is one of the constants of this module."""
    pipe.write(_MESSAGE_LENGTH_FORMAT.pack(len(content)) + kind + content)
    pipe.flush()


def receive_message(pipe: IO[bytes]) -> tuple[bytes, bytes]:
    """Return the type and the content of the next message.

    Raises:
        EOFError: the other side has ended.
    """
    (length,) = _MESSAGE_LENGTH_FORMAT.unpack(_read_bytes(pipe, _MESSAGE_LENGTH_FORMAT.size))
    return _read_bytes(pipe, 1), _read_bytes(pipe, length)


def read_until_token(pipe: IO[bytes], token: bytes) -> bytes:
    """Read up to the end of the token. Return the bytes before the token.

    Raises:
        EOFError: the other side has ended.
    """
    data = bytearray()
    while not data.endswith(token):
        data += _read_bytes(pipe, 1)
    return bytes(data[: -len(token)])


def _read_bytes(pipe: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = pipe.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
