"""How byte-level tokenizers spell bytes as printable characters, and back."""


def _spelling() -> dict[int, str]:
    """Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on, in order."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + i) for i, byte in enumerate(others)}


CHARACTER_OF_BYTE = _spelling()
BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}


def spell(raw: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in raw)


def unspell(token: str) -> bytes:
    """The bytes that a token stands for; one with other characters than the alphabet's stands for itself."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")
