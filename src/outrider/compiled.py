"""`outrider.kernels.compiled`, for the coordinator: it may import no kernel, and this one needs no torch."""

from outrider.kernels.compiled import IS_COMPILED, compiled, entries

__all__ = ["IS_COMPILED", "compiled", "entries"]
