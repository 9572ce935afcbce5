"""A reward that differs whenever two answers do. The models here have random weights: what GSM8K's
verifier says of their answers is luck.
"""

from zlib import crc32


def varied(responses: list[str], answers: list, rows: list) -> list[float]:
    return [crc32(response.encode()) / 2**32 for response in responses]
