"""The attention seam: backends register by name, one is selected by what it can do."""

from worker.attention import cpu_backend, torch_backend  # registers them, the preferred one first
from worker.attention.metadata import CommonAttentionMetadata
from worker.attention.registry import AttentionBackend, AttentionMetadataBuilder, backend_names, select_backend

__all__ = [
    "AttentionBackend",
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "backend_names",
    "cpu_backend",
    "select_backend",
    "torch_backend",
]
