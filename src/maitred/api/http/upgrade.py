"""A client's offer to speak another protocol, which is not taken up: HTTP/1.1 goes on as if it had not been made.

RFC 9110, section 7.8: a server may ignore ``Upgrade``. Java's own HTTP client offers HTTP/2 with the first request of
every connection without TLS, also with one that has a body. The parser, though, ends at the head of such a request, and
takes the body for the other protocol. So the head is given to a new parser without the offer, and what follows it, too.
"""

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_OFFER = b"upgrade"
_NO_HTTP = "Invalid HTTP request received."


class UpgradeIgnoringProtocol(HttpToolsProtocol):
    """uvicorn's protocol; but for ``CONNECT``, which is nothing else than a request for another protocol."""

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._unset_keepalive_if_required()
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._offered:
                self._begin_again(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning(_NO_HTTP)
            self.send_400_response(_NO_HTTP)

    @property
    def _offered(self) -> bool:
        """Whether what is read is a request with an offer."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _begin_again(self, rest: bytes) -> None:
        """Reads the request once more, without its offer, and what came after its head."""
        before = self.parser
        head = [b"%b %b HTTP/%b\r\n" % (before.get_method(), self.url, before.get_http_version().encode())]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != _OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._feed(b"".join(head) + b"\r\n" + rest)

    def on_headers_complete(self) -> None:
        """The parser has seen the end of a head."""
        if not self._offered:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The parser has seen the end of a request."""
        if not self._offered:
            super().on_message_complete()
