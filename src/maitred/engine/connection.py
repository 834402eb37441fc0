"""One gateway's connection, as the engine sees it: frames in, frames out, never waiting."""

import socket

from maitred.core.ports import LoadReport
from maitred.wire.frames import FrameReader, Output, Rejection, Step, Submit, ToEngine, ToGateway, encode_frame

MAX_UNSENT_BYTES = 64 * 1024 * 1024
_READ_BYTES = 256 * 1024


class Connection:
    """One gateway: the owner of its requests, and the bytes on their way to it."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.unsent = bytearray()
        self.rejections: list[Rejection] = []
        """Not yet reported."""
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)
        self._steps = 0
        self._submits_heard = 0

    def receive(self) -> list[ToEngine] | None:
        """What has arrived; None at the end of the stream.

        Raises:
            OSError: The connection broke.
            ProtocolViolation: The peer sent garbage.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        messages = self._reader.feed(data)
        self._submits_heard += sum(isinstance(message, Submit) for message in messages)
        return messages

    def send(self, message: ToGateway | None = None) -> None:
        """Sends what the socket takes now of this message and of what is left of earlier ones.

        Raises:
            OSError: The connection broke, or the peer has stopped reading.
        """
        if message is not None:
            self.unsent += encode_frame(message)
        if not self.unsent:
            return
        try:
            sent = self.socket.send(self.unsent)
        except BlockingIOError:
            sent = 0
        del self.unsent[:sent]
        if len(self.unsent) > MAX_UNSENT_BYTES:
            raise ConnectionAbortedError(f"the gateway left {len(self.unsent)} bytes unread")

    def send_step(self, outputs: list[Output], load: LoadReport) -> None:
        """Reports a step and whatever was rejected before it."""
        self._steps += 1
        rejections, self.rejections = self.rejections, []
        self.send(Step(self._steps, outputs, rejections, load, self._submits_heard))
