"""Instead of sglang's own, which imports its whole runtime for language models: only says where the rest of it is."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
