"""SGLang plugin: adapters (LoRA) may come as safetensors in a request, and are looked at when they are loaded.

SGLang looks at an adapter's tensors only when a request first needs them, in the scheduler; if one does not fit, the
whole engine ends. Here it is refused, and the engine continues. What was unloaded is forgotten.

SGLang finds this plugin through the entry point beside this file, that is, only in processes which have this directory
on their path.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.lora.lora_manager.LoRAManager."
    for name in ("load_lora_weights", "load_lora_weights_from_tensors"):
        HookRegistry.register(manager + name, check_loaded, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank", unpacked, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.unload_lora_adapter",
        forget_unloaded,
        HookType.AROUND,
    )


def unpacked(original: Any, worker: Any, messages: list[Any]) -> Any:
    """This rank's tensors by name. One message is for every rank, and may have them as one safetensors file."""
    from sglang.srt.runtime_context import get_parallel

    payload = original(worker, messages * get_parallel().tp_size if len(messages) == 1 else messages)
    if isinstance(payload, dict) and isinstance(file := payload.get("safetensors"), bytes):
        from safetensors.torch import load

        return load(file)
    return payload


async def forget_unloaded(original: Any, manager: Any, request: Any, *arguments: Any, **kwargs: Any) -> Any:
    """Unload, after forgetting where the adapter came from: SGLang loads it again at the next request for its name."""
    manager.lora_ref_cache.pop(request.lora_name, None)
    return await original(manager, request, *arguments, **kwargs)


def check_loaded(result: None, manager: Any, lora_ref: Any, *arguments: Any, **kwargs: Any) -> None:
    """Make what was just loaded the engine's own. Where it does not fit, drop it and raise ValueError, whose message
    SGLang answers with."""
    adapter = manager.loras[lora_ref.lora_id]
    try:
        problem = misfit(manager, adapter)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        del manager.loras[lora_ref.lora_id]
        manager.configs.pop(lora_ref.lora_id, None)
        raise ValueError(f"adapter {lora_ref.lora_name} does not fit the model: {problem}")
    for layer in adapter.layers:
        # Until then they lie in the file, which may go when the answer is there.
        layer.weights.update({name: weight.clone() for name, weight in layer.weights.items()})


def misfit(manager: Any, adapter: Any) -> str | None:
    """What of an adapter's factors has no place or another shape in this rank's part of the model; None: all fits."""
    from sglang.srt.lora.utils import get_stacked_multiply, get_target_module_name

    rank, pool = adapter.config.r, manager.memory_pool
    if not any(layer.weights for layer in adapter.layers):
        return "it has no factors for any layer"
    for number, layer in enumerate(adapter.layers):
        modules = {
            get_target_module_name(name, manager.target_modules): module
            for name, module in manager.lora_modules[number].items()
            if not hasattr(module, "slice_moe_lora_a_weights")
        }
        for name, weight in layer.weights.items():
            target = get_target_module_name(name, manager.target_modules)
            if ".experts." in name:
                continue
            if target not in modules:
                return f"layer {number} has nothing for {name}"
            if ".lora_A." in name:
                rows = rank * get_stacked_multiply(target, manager.base_model)
                result, expected = modules[target].slice_lora_a_weights(weight), pool.A_buffer[target][number][0, :rows]
            else:
                result = modules[target].slice_lora_b_weights(weight)
                expected = pool.B_buffer[target][number][0, :, :rank]
            if result.shape != expected.shape:
                return f"{name} has shape {list(result.shape)} where this rank needs {list(expected.shape)}"
    return None
