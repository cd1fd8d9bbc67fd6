"""The flags of ``brigade serve`` and of ``scripts.serve``: one list for both."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from engine.config import MAX_LOOKUP_TOKENS
from engine.openai.settings import HttpSettings, check_installed, parse_address, read_keys
from ipc.errors import ConfigError
from ipc.logs import LEVELS
from worker.graphs.modes import MODE_NAMES
from worker.settings import ATTENTION_BACKENDS, TRANSPORTS

MAX_BYTES = 1 << 60
MAX_COUNT = (1 << 31) - 1
MAX_SECONDS = 1e7
MAX_SEED = (1 << 63) - 1
DEFAULT_MAX_NUM_SEQS = 256

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number of bytes, with an optional unit: 500M, 2GiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes as an integer; fails with a usage error."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", value.strip().lower())
        if match is None:
            self.fail(f"{value!r} is not a number of bytes such as 500M or 2GiB", param, ctx)
        number = float(match[1]) * UNITS[match[2] or ""]
        if not number < MAX_BYTES:
            self.fail(f"{value!r} is more than any machine has", param, ctx)
        return int(number)


class Seconds(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A finite span of time."""

    name = "seconds"

    def __init__(self, least: float) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds as a number; fails with a usage error."""
        try:
            seconds = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        if not self.least <= seconds <= MAX_SECONDS:
            self.fail(f"{value} must be between {self.least:g} and {MAX_SECONDS:g} seconds", param, ctx)
        return seconds


class Sizes(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Whole numbers with commas between them: 1,2,4,8. Which of them make sense is not known here."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers as they stand; fails with a usage error."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")] if value.strip() else []
        for word in words:
            if not re.fullmatch(r"[+-]?\d{1,9}", word, re.ASCII):
                self.fail(f"{word!r:.80} is not a number of tokens; give sizes such as 1,2,4,8", param, ctx)
        return tuple(map(int, words))


class GroupedCommand(click.Command):
    """A command whose help shows its options by topic, and which remembers its arguments as they were typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words for a command that hands them on."""
        ctx.meta["brigade.words"] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section per topic."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "topic", "General"), []).append(record)
        for topic, records in sections.items():
            with formatter.section(topic):
                formatter.write_dl(records)


class TopicOption(click.Option):
    """An option that belongs to a topic of the help."""

    def __init__(self, *args: Any, topic: str = "General", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.topic = topic


def _option(topic: str, *names: str, **kwargs: Any) -> Callable[[Any], Any]:
    return click.option(*names, cls=TopicOption, topic=topic, show_default=True, **kwargs)


_PIPELINE, _MODEL, _MEMORY, _SERVICE, _TIME = "Pipeline", "Model", "Scheduling and memory", "Clients", "Deadlines"
_HTTP = "HTTP"

HTTP_OPTIONS = (
    _option(_HTTP, "--api-key", multiple=True, metavar="KEY",
            help="Let in only who sends this key; repeatable. Other users of this machine can see it here: prefer a file."),
    _option(_HTTP, "--api-key-file", multiple=True, metavar="FILE", type=click.Path(dir_okay=False),
            help="The same, a key a line."),
    _option(_HTTP, "--cors-origin", multiple=True, metavar="ORIGIN",
            help="Let pages of this origin, such as https://example.com, call from a browser; * for all. Repeatable."),
    _option(_HTTP, "--served-model-name", multiple=True, metavar="NAME",
            help="Another name for the model; the first is what answers say. Repeatable."),
    _option(_HTTP, "--max-body-size", type=Bytes(), default="8Mi", help="Most bytes of a request's body."),
)
"""Of serve and of http."""

SERVE_OPTIONS = (
    click.argument("model"),
    _option(_PIPELINE, "--pipeline-parallel-size", "--pp", type=click.IntRange(1, 1024), default=None,
            help="Stages, one process each.  [default: 1; under torchrun the number of ranks]"),
    _option(_PIPELINE, "--tensor-parallel-size", "--tp", type=click.IntRange(1), default=1,
            help="Ranks that share a stage; only 1 works for now."),
    _option(_PIPELINE, "--pipeline-partition", default="auto", metavar="auto|even|N,N,…",
            help="Layers per stage; auto measures what layers, embedding and head cost here."),
    _option(_PIPELINE, "--transport", type=click.Choice(TRANSPORTS), default="auto",
            help="What carries activations between stages; auto takes gloo on CPUs, nccl where each rank has a GPU of its "
            "own, else staged, through the hosts' memory."),
    _option(_MODEL, "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
            help="Where stages compute; auto takes a GPU if this host has one. Ranks beyond the number of "
            "GPUs share them."),
    _option(_MODEL, "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto",
            help="Type of weights, activations and KV cache; auto takes the checkpoint's."),
    _option(_MODEL, "--max-model-len", type=click.IntRange(2, MAX_COUNT), default=None,
            help="Most tokens of a prompt and its answer together.  [default: the model's, or what the KV pool holds]"),
    _option(_MODEL, "--attention-backend", default="auto", metavar="NAME",
            help=f"Attention implementation: auto takes the best that fits; {', '.join(ATTENTION_BACKENDS)}, or one "
            "registered by an installed package, insists on it."),
    _option(_MODEL, "--cudagraph-mode", type=click.Choice(MODE_NAMES, case_sensitive=False), default="auto",
            help="What of which steps is captured once and replayed; auto takes full_and_piecewise on a GPU and none on a "
            "CPU. A mode that the attention backend can't serve is lowered."),
    _option(_MODEL, "--cudagraph-capture-sizes", type=Sizes(), default=None, metavar="N,N,…",
            help="Tokens that captured steps have; others are padded to the next size, larger ones run eagerly.  "
            "[default: 1, 2, 4, multiples of 8, from 256 on of 16, up to twice --max-num-seqs but at most 512]"),
    _option(_MODEL, "--logits-processor", multiple=True, metavar="MODULE:ATTR",
            help="Function that changes logits for requests that name it; repeatable. See docs/sampling.md."),
    _option(_MODEL, "--generation-config", type=click.Choice(["auto", "none"]), default="auto",
            help="Where requests leave temperature, top_k, top_p, min_p, typical_p or repetition_penalty unset: take what the "
            "model's generation_config says, or nothing of it. See docs/sampling.md."),
    _option(_MODEL, "--seed", type=click.IntRange(0, MAX_SEED), default=None,
            help="Makes the seeds of unseeded requests repeatable."),
    _option(_MEMORY, "--max-num-seqs", type=click.IntRange(1, 1 << 16), default=None,
            help="Most requests that run at once, all stages together.  "
            f"[default: {DEFAULT_MAX_NUM_SEQS}, or --max-num-batched-tokens if that is less]"),
    _option(_MEMORY, "--max-num-batched-tokens", type=click.IntRange(1, MAX_COUNT), default=2048,
            help="Most tokens of one step; longer prompts are computed in chunks."),
    _option(_MEMORY, "--block-size", type=click.IntRange(1, 1 << 16), default=16, help="Tokens per KV block, a power of two."),
    _option(_MEMORY, "--num-kv-blocks", type=click.IntRange(1, MAX_COUNT), default=None,
            help="KV blocks in the pool.  [default: by measured free memory]"),
    _option(_MEMORY, "--kv-cache-memory", type=Bytes(), default=None,
            help="KV cache bytes per stage, such as 2GiB.  [default: by measured free memory]"),
    _option(_MEMORY, "--prefix-caching/--no-prefix-caching", default=True,
            help="Keep the KV blocks of finished requests while there is room, for prompts that begin the same."),
    _option(_MEMORY, "--max-queued-requests", type=click.IntRange(1, MAX_COUNT), default=4096,
            help="Requests that may wait beyond those that run; more are refused at once."),
    _option(_MEMORY, "--max-queued-tokens", type=click.IntRange(1, 1 << 40), default=1 << 22,
            help="Prompt tokens that may wait; more are refused at once, except when nobody waits."),
    _option(_MEMORY, "--scheduling-policy", type=click.Choice(["fcfs", "priority"]), default="fcfs",
            help="First come, first served; or lowest priority number first, which also preempts the highest."),
    _option(_MEMORY, "--async-scheduling/--no-async-scheduling", default=True,
            help="Keep one step more in flight than there are stages, so that stages never wait for the core."),
    _option(_MEMORY, "--prefill-share", type=click.FloatRange(0, 1, min_open=True), default=0.62,
            help="Share s of the time for a prompt while answers stream: streams get 1/(1-s) times slower, the prompt "
            "1/s times; 1 does not throttle prompts."),
    _option(_MEMORY, "--speculative-lookup-tokens", type=click.IntRange(0, MAX_LOOKUP_TOKENS), default=0, metavar="K",
            help="Compute up to K guessed tokens with a request's newest one while its answer repeats what stands in its "
            "prompt or in itself; the tokens stay the same. 0 for none. See docs/speculation.md."),
    _option(_MEMORY, "--num-cohorts", type=click.IntRange(1), default=None, hidden=True,
            help="Fixed number of groups of decodes; for comparison."),
    _option(_MEMORY, "--single-batch", is_flag=True, hidden=True,
            help="One step in flight, which takes all that is ready; for comparison."),
    _option(_SERVICE, "--listen", multiple=True, metavar="ADDR",
            help="Client address, tcp://HOST:PORT or ipc://PATH; repeatable.  "
            "[default: tcp://127.0.0.1:5757 if free, else a free port]"),
    _option(_SERVICE, "--http", metavar="HOST:PORT", default=None,
            help="Also serve HTTP as OpenAI's API does; port 0 takes any that is free, told in the ready line. See docs/http.md."),
    *HTTP_OPTIONS,
    _option(_SERVICE, "--server-key", "--curve-secret-key", "server_key", metavar="FILE", default=None,
            help="Speak CURVE, and nothing else, on tcp addresses, with the secret key in this file (brigade keygen)."),
    _option(_SERVICE, "--client-keys", "--curve-allow", "client_keys", metavar="FILE|DIR", default=None,
            help="Let in only clients with these public keys: a key file, or a directory of .key files, read at the start."),
    _option(_SERVICE, "--insecure", is_flag=True,
            help="Allow addresses that other machines can reach where nobody is asked for a key."),
    _option(_TIME, "--link-timeout", type=Seconds(1), default=60.0,
            help="Seconds a stage waits for its neighbour within a step before the group is restarted."),
    _option(_TIME, "--drain-timeout", type=Seconds(0), default=30.0,
            help="Seconds that running requests get to finish at shutdown."),
    _option(_TIME, "--health-timeout", type=Seconds(1), default=30.0,
            help="Seconds without a sign of life after which a process counts as lost."),
    _option("General", "--log-level", type=click.Choice(LEVELS), default="info", help="How much is logged."),
    _option("General", "--error-file", hidden=True, default=None),
)


CLIENT_KEY_OPTIONS = (
    click.option("--server-key", metavar="KEY|FILE", default=None,
                 help="Public key of an engine that has --server-key, or its file.  [default: BRIGADE_SERVER_KEY]"),
    click.option("--client-key", metavar="FILE", default=None,
                 help="Secret key file of this client, where the engine has --client-keys.  [default: BRIGADE_CLIENT_KEY]"),
)  # fmt: skip
"""Of every command that connects."""


def client_key_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the keys that it connects with."""
    for decorate in reversed(CLIENT_KEY_OPTIONS):
        function = decorate(function)
    return function


def serve_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the flags of serve."""
    for decorate in reversed(SERVE_OPTIONS):
        function = decorate(function)
    return function


def http_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with what all HTTP servers have."""
    for decorate in reversed(HTTP_OPTIONS):
        function = decorate(function)
    return function


def http_settings(address: str | None, options: Mapping[str, Any]) -> HttpSettings | None:
    """From the flags; None without an address. Raises ConfigError, also when something must be installed first."""
    if address is None:
        for name in ("api_key", "api_key_file", "cors_origin", "served_model_name"):
            if options[name]:
                raise ConfigError(f"--{name.replace('_', '-')}", "needs --http HOST:PORT")
        return None
    check_installed()
    keys = read_keys(options["api_key"], options["api_key_file"])
    host, port = parse_address(address, insecure=options["insecure"], has_key=bool(keys))
    return HttpSettings(
        host=host, port=port, api_keys=keys, cors_origins=options["cors_origin"],
        served_model_names=options["served_model_name"], max_body_bytes=options["max_body_size"],
    )  # fmt: skip
