"""Parse and print HLO text with the runtime, for tests that write modules by hand or look for what XLA printed."""

import importlib

from meshkit.hlo.proto import Module


def serialized_hlo(text):
    """Return the `HloModuleProto` of a module; XLA does not parse all that it prints of optimized ones."""
    return _bindings().hlo_module_from_text(text).as_serialized_hlo_module_proto()


def parse_hlo(text):
    """Return the module of a text."""
    return Module(serialized_hlo(text))


def printed(serialized):
    """Return the text of a serialized module."""
    return _bindings().HloModule.from_serialized_hlo_module_proto(serialized).to_string()


def compiled_module(compiled):
    """Return the module of what `jitted.lower(...).compile()` gave."""
    (module,) = compiled.runtime_executable().hlo_modules()
    return Module(module.as_serialized_hlo_module_proto())


def _bindings():
    try:
        return importlib.import_module("jaxlib._hlo")
    except ImportError:  # jax 0.11 keeps them in another extension module.
        return importlib.import_module("jaxlib._jax")
