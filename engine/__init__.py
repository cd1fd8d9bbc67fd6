"""EngineCore, its scheduler, and the clients that speak text. Never imports torch."""

from engine.aclient import AsyncClient
from engine.client import Client
from engine.outputs import Output, TokenLogprob, Usage
from ipc.params import SamplingParams

__all__ = ["AsyncClient", "Client", "Output", "SamplingParams", "TokenLogprob", "Usage"]
