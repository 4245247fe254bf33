"""The routes of a server with workers of its own: OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from toolkit.engines.tokenizer import Tokenizer
from toolkit.serve.access import Keyring, check_priority
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.driver import Driver
from toolkit.serve.errors import ApiError
from toolkit.serve.forms import (
    BodyReader,
    ChatForm,
    CompletionForm,
    GenerationForm,
    LargeBodies,
    Prompts,
    is_large,
    read_form,
    read_json_bytes,
)
from toolkit.serve.generation import EventStream, Generation, json_response
from toolkit.serve.metrics import engine_families
from toolkit.serve.routes import FrontPages
from toolkit.serve.status import failure, gauges, state


class Routes(FrontPages):
    """The routes over a driver that its owner starts and stops. Each reads a form, makes one call,
    and writes the response.
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
        return await self._generate(request, CompletionForm)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatForm)

    async def responses(self) -> Response:
        """Refuse the only route of OpenAI's for text that this engine lacks."""
        text = "this engine has no /v1/responses; a recipe with engine 'vllm' serves it"
        raise ApiError(text, status=404, code="unsupported_route")

    async def _generate(self, request: Request, kind: type[GenerationForm]) -> Response:
        body = await read_json_bytes(request, self.settings.max_body_bytes)
        form: GenerationForm
        prompts: Prompts | None = None
        if is_large(body):
            self._generation.check_room()
            form, prompts = await self._large_bodies.read(
                lambda body: self._reader.read(kind, body), body
            )
        else:
            form = read_form(kind, body)
        check_priority(request.scope, form.priority or 0)
        exchange = self._generation.submit(form, prompts)
        if not form.stream:
            return await json_response(exchange, request.receive)
        keepalive_s = self.settings.keepalive_s
        return EventStream(exchange, keepalive_s, include_usage=form.include_usage)
