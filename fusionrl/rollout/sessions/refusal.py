"""The error of a request that a session does not answer."""


class Refused(Exception):
    """A request that gets an error in its protocol's form.

    status  of HTTP. Clients send a request again after 408, 409, 429 and 5xx, and after no other
    code    as OpenAI names it, "context_length_exceeded" say
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code
