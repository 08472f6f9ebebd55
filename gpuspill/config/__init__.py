"""Options: what there is, where a value comes from, and what JIT-unspill"s settings mean."""

from __future__ import annotations

from gpuspill.config.settings import CODECS, Settings, codec_names, is_on, simulated_options

__all__ = ["CODECS", "Settings", "codec_names", "is_on", "simulated_options"]
