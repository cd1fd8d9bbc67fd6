"""Encoders of what isn't text, one family a file, and how their items are packed into few passes."""

from worker.encoders.encoder import ITEM_IDS, Item, PackedEncoder, PackedInput

__all__ = ["ITEM_IDS", "Item", "PackedEncoder", "PackedInput"]
