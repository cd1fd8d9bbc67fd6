"""The attention seam: backends register by name, one is selected by what it can do."""

from worker.attention import cpu_backend, torch_backend, triton_backend  # registers them
from worker.attention.backend import AttentionBackend, AttentionMetadataBuilder, AttentionNeeds, Capabilities
from worker.attention.metadata import CommonAttentionMetadata
from worker.attention.registry import backend_names, register, select_backend

__all__ = [
    "AttentionBackend",
    "AttentionMetadataBuilder",
    "AttentionNeeds",
    "Capabilities",
    "CommonAttentionMetadata",
    "backend_names",
    "cpu_backend",
    "register",
    "select_backend",
    "torch_backend",
    "triton_backend",
]
