"""The routes of a server with workers of its own: OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from toolkit.engines.tokenizer import Tokenizer
from toolkit.openai.engine_requests import read_engine_request
from toolkit.openai.errors import ApiError
from toolkit.serve.access import Keyring, check_priority
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.bodies import BodyReader, LargeBodies, Prompts, is_large, read_json_bytes
from toolkit.serve.driver import Driver
from toolkit.serve.generation import EventStream, Generation, json_response
from toolkit.serve.metrics import engine_families
from toolkit.serve.routes import FrontPages
from toolkit.serve.status import failure, gauges, state


class Routes(FrontPages):
    """The routes over a driver that its owner starts and stops. Each reads a request, makes one
    call, and writes the response.
    """

    def __init__(
        self, driver: Driver, tokenizer: Tokenizer, settings: FrontSettings, keyring: Keyring
    ) -> None:
        super().__init__(settings, keyring)
        self._driver = driver
        self._reader = BodyReader(tokenizer, settings.vocab_size, settings.max_model_len)
        self._large_bodies = LargeBodies()
        self._generation = Generation(driver, tokenizer, settings, self._reader)
        for path, endpoint in (
            ("/v1/completions", self.completions),
            ("/v1/chat/completions", self.chat_completions),
        ):
            self.add(path, endpoint, "POST")
        for path in ("/v1/responses", "/v1/responses/{rest:path}"):
            self.add(path, self.responses, "GET", "POST", "DELETE")

    @property
    def served(self) -> str:
        return self.settings.model

    @property
    def state(self) -> str:
        return state(self._driver)

    @property
    def failure(self) -> str:
        return failure(self._driver)

    def about_model(self) -> dict[str, object]:
        return {"max_model_len": self.settings.max_model_len}

    def families(self) -> Iterable[Metric]:
        driver = self._driver
        return engine_families(driver.stats, gauges(driver), self.served, self.keyring.named)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, chat=True)

    async def responses(self) -> Response:
        """Refuse the only route of OpenAI's for text that this engine lacks."""
        text = "this engine has no /v1/responses; a recipe with engine 'vllm' serves it"
        raise ApiError(text, status=404, code="unsupported_route")

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        body = await read_json_bytes(request, self.settings.max_body_bytes)
        prompts: Prompts | None = None
        if is_large(body):
            self._generation.check_room()
            read = partial(self._reader.read, chat=chat)
            asked, prompts = await self._large_bodies.read(read, body)
        else:
            asked = read_engine_request(body, chat=chat)
        check_priority(request.scope, asked.priority)
        exchange = self._generation.submit(asked, prompts)
        if not asked.stream:
            return await json_response(exchange, request.receive)
        return EventStream(exchange, self.settings.keepalive_s)
