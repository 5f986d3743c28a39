"""Instead of sglang's own, which imports every model that it knows: only says where the rest of it is."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
