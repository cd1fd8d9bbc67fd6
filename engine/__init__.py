"""EngineCore, its scheduler, and the clients that speak text. Never imports torch."""

from engine.aclient import AsyncClient
from engine.client import Client
from engine.outputs import Output, TokenLogprob, Usage
from ipc.params import SamplingParams
from ipc.structured import StructuredOutput

__all__ = ["AsyncClient", "Client", "Output", "SamplingParams", "StructuredOutput", "TokenLogprob", "Usage"]
