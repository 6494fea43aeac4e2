"""The seams through which transformers reaches us, installed once and reversible.

* `QuantizedCache.__new__`: a backend name of ours gives our cache, any other goes on to the original. Its
  `__init__` is wrapped only to accept what the published examples write (`"HQQ"`, `"device"`), which today
  fails.
* `GenerationMixin._prepare_cache_for_generation`: after it, the cache is told what it never sees by itself:
  padding, final length, rotary parameters.
* `generate` of Janus, which makes images past that: before it, a cache of ours is built, and told the same.
* `generate` of SpeechT5, which speaks past that: before it, a cache of ours is refused.
* `init_continuous_batching` and `generate_batch`: before them, a cache of ours is refused.
* The attention functions, and `AttentionInterface.get_interface`, by which models ask for their own `eager`
  one: a handle goes to us, anything else straight through; and our own function is registered.
* `expand_kv` of models with latents, when a cache of ours first meets one (`attention.latent_models`).

Nothing of transformers is imported here: a seam whose module is not loaded yet is installed when it is, so
that importing this package costs next to nothing. Each seam checks that what it wraps still looks as
expected, and names the installed version if not.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .assistant_calls import choose_cache_of_assistant
from .cache_requests import check_batching, check_request, check_speech
from .config import drop_legacy_keys
from .errors import IncompatibleTransformersError
from .generation_calls import bind_cache, check_before_encoder, check_prepared, ready_to_build
from .registry import TRANSFORMERS_BACKENDS, get_backend
from .undoing import undo_all

__all__ = ["install", "uninstall"]

_OWN_ATTENTION = "kvcache_plugins"
_TOLD = ("generation_config", "model_kwargs", "generation_mode", "max_cache_length")
"""What a cache is told of a call, of what transformers knows of it."""
_READING_ENCODERS = (
    "_maybe_prepare_encoder_kwargs_for_generation",
    "_prepare_encoder_decoder_kwargs_for_generation",
)
"""Names of the method in which an encoder reads, the newest first."""
_READING_PROMPTS = ("_prefill",)
"""The same of a prompt, which some releases read by no method of its own."""

_Undo = Callable[[], None]
_undo: list[_Undo] = []


def install() -> None:
    """Install the dispatch, all of it or nothing. Importing the package does this; again changes nothing.

    Raises:
        IncompatibleTransformersError: If the installed transformers lacks a seam.
    """
    if _watcher in sys.meta_path or _undo:
        return
    for finder in list(sys.meta_path):
        if type(finder).__module__ == __name__ and type(finder).__name__ == _ImportWatcher.__name__:
            # of a copy of this package that was imported before; an older release has no such thing
            getattr(finder, "withdraw", lambda: None)()
    pending = {}
    try:
        for name, seam in _SEAMS.items():
            if name in sys.modules:
                seam(sys.modules[name])
            else:
                pending[name] = seam
    except BaseException:
        uninstall()
        raise
    _watcher.pending = pending
    sys.meta_path.insert(0, _watcher)  # if nothing is left to watch for, as the sign of what is installed


def uninstall() -> None:
    """Put everything back as transformers had it, hooks on models included.

    Caches that are in use must be bound again (`KVCache.bind`), after `install()`, before they are read on.
    """
    if _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)
    _watcher.pending = {}
    while _undo:
        _undo.pop()()
    undo_all()


def _quantized_cache_seam(module: ModuleType) -> None:
    """Install into `transformers.cache_utils`."""
    cls = _expect(module, "QuantizedCache")
    _expect_parameters(cls.__init__, ("self", "backend", "config"))
    original_init = cls.__init__

    def new(klass: type, backend: Any = None, config: Any = None, *args: Any, **options: Any) -> Any:
        name = str(backend).lower()
        # copies are made without arguments
        if klass is cls and backend is not None and name not in TRANSFORMERS_BACKENDS:
            if args:
                raise ValueError(
                    f"Options of the backend {backend!r} must be given by name, got {args!r} by position."
                )
            get_backend(backend)  # an unknown name fails here, naming the closest
            build_cache = importlib.import_module(f"{__package__}.building").build_cache
            return build_cache(config, {**options, "backend": backend})
        return object.__new__(klass)

    @wraps(original_init)
    def init(self: Any, backend: Any, config: Any, *args: Any, **options: Any) -> None:
        original_init(self, str(backend).lower(), config, *args, **drop_legacy_keys(options))

    cls.__new__ = new
    cls.__init__ = init

    def undo() -> None:
        # A class whose `__new__` was once replaced refuses arguments through `object.__new__`; ignoring them
        # is what `object.__new__` did before.
        cls.__new__ = lambda klass, *args, **kwargs: object.__new__(klass)
        cls.__init__ = original_init

    _undo.append(undo)


def _generation_seam(module: ModuleType) -> None:
    """Install into `transformers.generation.utils`."""
    cls = _expect(module, "GenerationMixin")
    original = _expect(cls, "_prepare_cache_for_generation")
    _expect_parameters(original, ("self", *_TOLD))
    _expect(cls, "_supports_default_dynamic_cache")
    signature = inspect.signature(original)

    @wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs).arguments
        call = self, bound["generation_config"], bound["model_kwargs"]
        choose_cache_of_assistant(*call)
        check_request(*call)
        with ready_to_build(*call):
            result = original(self, *args, **kwargs)
        bind_cache(self, **{name: bound[name] for name in _TOLD})
        return result

    cls._prepare_cache_for_generation = prepare
    _undo.append(lambda: setattr(cls, "_prepare_cache_for_generation", original))
    of_call = ("generation_config", "model_kwargs")
    _check_before(cls, _READING_ENCODERS, check_before_encoder, of_call)
    _check_before(cls, _READING_PROMPTS, check_prepared, ("input_ids", *of_call))
    _batching_seam(cls)


def _check_before(cls: type, names: Sequence[str], check: Callable[..., None], told: Sequence[str]) -> None:
    """Install a check into the class that generates; nothing if its release has no such method.

    Args:
        cls (`type`): The class.
        names (`Sequence[str]`): Of the method before which is checked, those of the newest releases first.
        check (`Callable`): Given the model, and what of the method's arguments it is told.
        told (`Sequence[str]`): Their names.
    """
    name = next((name for name in names if name in vars(cls)), None)
    if name is None:
        return
    original = vars(cls)[name]
    signature = inspect.signature(original)
    if not set(told) <= set(signature.parameters):
        return

    @wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs).arguments
        check(self, **{argument: bound[argument] for argument in told})
        return original(self, *args, **kwargs)

    setattr(cls, name, checked)
    _undo.append(lambda: setattr(cls, name, original))


def _batching_seam(cls: type) -> None:
    """Install into the class that generates; nothing if its release knows no continuous batching."""
    _check_batching_before(cls, "init_continuous_batching")
    _check_batching_before(cls, "generate_batch")


def _check_batching_before(cls: type, name: str) -> None:
    """Install into one method, which is inherited: there is nothing to replace, and to put back."""
    original = getattr(cls, name, None)
    if original is None:
        return
    signature = inspect.signature(original)

    @wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args).arguments.get("generation_config")
        check_batching(self, kwargs.get("generation_config", given), kwargs)
        return original(self, *args, **kwargs)

    setattr(cls, name, checked)
    _undo.append(lambda: delattr(cls, name))


def _image_seam(module: ModuleType) -> None:
    """Install into `transformers.models.janus.modeling_janus`."""
    cls = _expect(module, "JanusForConditionalGeneration")
    original = _expect(cls, "generate")
    signature = inspect.signature(original)

    @wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache_for_image = importlib.import_module(f"{__package__}.image_calls").cache_for_image
        mask = signature.bind(self, *args, **kwargs).arguments.get("attention_mask")
        return original(self, *args, **{**kwargs, **cache_for_image(self, mask, kwargs)})

    cls.generate = generate
    _undo.append(lambda: setattr(cls, "generate", original))


def _speech_seam(module: ModuleType) -> None:
    """Install into `transformers.models.speecht5.modeling_speecht5`."""
    cls = _expect(module, "SpeechT5ForTextToSpeech")
    original = _expect(cls, "generate")

    @wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_speech(self, kwargs)
        return original(self, *args, **kwargs)

    cls.generate = generate
    _undo.append(lambda: setattr(cls, "generate", original))


def _attention_seam(module: ModuleType) -> None:
    """Install into `transformers.modeling_utils`."""
    interface = _expect(module, "AttentionInterface")
    mapping = _expect(interface, "_global_mapping")
    get_interface = _expect(interface, "get_interface")
    _expect_parameters(get_interface, ("self", "attn_implementation", "default"))
    replaced = {
        name: fn for name, fn in mapping.items() if name in ("sdpa", "flex_attention") or _is_flash(name)
    }
    for name, original in replaced.items():
        mapping[name] = _lazy_wrapper(original)
    mapping[_OWN_ATTENTION] = _lazy_attention

    @wraps(get_interface)
    def find(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = get_interface(self, attn_implementation, default)
        return _without_handles(found) if attn_implementation == "eager" else found

    interface.get_interface = find

    def undo() -> None:
        interface.get_interface = get_interface
        mapping.update(replaced)
        mapping.pop(_OWN_ATTENTION, None)

    _undo.append(undo)


def _mask_seam(module: ModuleType) -> None:
    """Install into `transformers.masking_utils`: our attention function wants the masks of `sdpa`.

    Without one its queries are the newest tokens. Those of a prompt that fills a part of a static cache are
    not, and `sdpa`, which takes queries for the first tokens, is given no mask for them either.
    """
    mapping = _expect(_expect(module, "AttentionMaskInterface"), "_global_mapping")
    if "sdpa" not in mapping:
        raise _incompatible("masking_utils.AttentionMaskInterface['sdpa']")
    mapping[_OWN_ATTENTION] = _of_newest_queries(mapping["sdpa"])
    _undo.append(lambda: mapping.pop(_OWN_ATTENTION, None))


def _of_newest_queries(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Let masks be left out only where the first queries are the newest as well."""

    @wraps(make_mask)
    def make(
        batch_size: int,
        q_length: int,
        kv_length: int,
        *args: Any,
        allow_is_causal_skip: bool = True,
        **kwargs: Any,
    ) -> Any:
        may_skip = allow_is_causal_skip and (q_length == 1 or q_length == kv_length)
        return make_mask(batch_size, q_length, kv_length, *args, allow_is_causal_skip=may_skip, **kwargs)

    return make


_SEAMS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.cache_utils": _quantized_cache_seam,
    "transformers.generation.utils": _generation_seam,
    "transformers.masking_utils": _mask_seam,
    "transformers.models.janus.modeling_janus": _image_seam,
    "transformers.models.speecht5.modeling_speecht5": _speech_seam,
    "transformers.modeling_utils": _attention_seam,
}


class _ImportWatcher(MetaPathFinder):
    """Installs a seam right after its module was executed for the first time.

    It is found by a package of the same name that is imported later, after this one was taken out of
    `sys.modules`, which then replaces what this one has installed.
    """

    def __init__(self) -> None:
        self.withdraw = uninstall
        self.pending: dict[str, Callable[[ModuleType], None]] = {}
        self._searching = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.pending or getattr(self._searching, "name", None) == name:
            return None
        self._searching.name = name  # a finder may ask all the others, as this one does
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None and spec.loader is not None), None)
        finally:
            self._searching.name = None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if name in self.pending:  # not if the dispatch was uninstalled meanwhile
                    self.pending[name](module)
                    del self.pending[name]  # only now: a module that fails is executed anew when asked again

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # serves this module only
        return spec


_watcher = _ImportWatcher()


def _is_flash(name: str) -> bool:
    return name.startswith("flash_attention")


def _lazy_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `original` by `attention.dispatch`, which is imported with the first cache of ours."""
    name = f"{__package__}.attention.dispatch"
    wrapped: tuple[Any, Callable[..., Any]] | None = None

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal wrapped
        dispatch = sys.modules.get(name)
        if dispatch is None:  # no cache of ours has been built, so nothing can be a handle
            return original(*args, **kwargs)
        if wrapped is None or wrapped[0] is not dispatch:
            wrapped = dispatch, dispatch.wrap_attention_function(original)
        return wrapped[1](*args, **kwargs)

    return forward


def _without_handles(eager: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's own attention function by `attention.eager`, once a cache of ours has been built."""
    module: Any = sys.modules.get(f"{__package__}.attention.eager")  # as a compiler can trace it
    return eager if module is None else module.wrap_eager_function(eager)


def _lazy_attention(*args: Any, **kwargs: Any) -> Any:
    name = f"{__package__}.attention.dispatch"
    dispatch: Any = sys.modules.get(name) or importlib.import_module(name)  # a compiler can trace the first
    return dispatch.attention_forward(*args, **kwargs)


def _expect(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise _incompatible(f"{owner.__name__}.{name}")
    return getattr(owner, name)


def _expect_parameters(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    found = inspect.signature(function).parameters
    missing = [name for name in names if name not in found]
    if missing:
        raise _incompatible(f"the parameters {missing} of {function.__qualname__}")


def _incompatible(what: str) -> IncompatibleTransformersError:
    version = getattr(sys.modules.get("transformers"), "__version__", "unknown")
    return IncompatibleTransformersError(
        f"kvcache_plugins needs {what}, which transformers {version} does not have."
    )
