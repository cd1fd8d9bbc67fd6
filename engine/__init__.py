"""EngineCore, its scheduler, and the clients that speak text. Never imports torch."""

from engine.aclient import AsyncClient
from engine.batch import Result
from engine.client import Client
from engine.outputs import Output, TokenLogprob, Usage
from engine.progress import BatchProgress
from ipc.params import SamplingParams
from ipc.structured import StructuredOutput

__all__ = ["AsyncClient", "BatchProgress", "Client", "Output", "Result", "SamplingParams", "StructuredOutput", "TokenLogprob", "Usage"]
