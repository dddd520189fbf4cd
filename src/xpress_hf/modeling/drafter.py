"""`XPressDrafter`: fusion, backbone and refiner as one `PreTrainedModel`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import GENERATION_CONFIG_NAME

from ..checkpoints.files import HUB_OPTIONS, find_file, write_hashes
from ..checkpoints.loading import open_checkpoint
from ..configuration import SpeculationConfig, XPressConfig
from .backbone import Backbone
from .fusion import LayerwiseFusion, build_fusion
from .length_head import AdaptiveLengthHead
from .refiner import CausalRefiner, Chooser, greedy_choice, refine_block

CONFIG_FIELDS = {field.name for field in dataclasses.fields(XPressConfig)} - {
    field.name for field in dataclasses.fields(PreTrainedConfig)
}

PUSH_OPTIONS = {"repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags"}


@dataclass
class BlockDraft:
    """Drafted ids [N, D] and the logits they were chosen from [N, D, V]."""

    ids: torch.Tensor
    logits: torch.Tensor


class XPressDrafter(PreTrainedModel):
    """A block-diffusion drafter with a causal refiner, used as `target.generate(..., assistant_model=drafter)`.

    It owns neither embeddings nor an output head: both are borrowed from the target at call time, so they are never
    saved and never trained. `forward` has the signature of transformers' own block drafters; without a refiner the
    model also runs under `speculation_type="dflash"`.

    Attributes:
        speculation: [`SpeculationConfig`], how generate() runs this drafter.
        last_acceptance: `AcceptanceRecord` of the latest generate() call, `None` before the first.
        last_row_acceptance: the same for every row of a batch on its own.
    """

    config_class = XPressConfig
    base_model_prefix = "drafter"
    main_input_name = "noise_embeds"
    input_modalities = ("text",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["BackboneLayer"]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: XPressConfig):
        config.check()
        super().__init__(config)
        self.fusion = build_fusion(config)
        self.backbone = Backbone(config)
        self.refiner = CausalRefiner(config) if config.refiner is not None else None
        self.length_head = AdaptiveLengthHead(config) if config.length_head is not None else None
        self.speculation = SpeculationConfig.from_dict(config.speculation or {})
        self.last_acceptance: Any = None
        self.last_row_acceptance: list[Any] = []
        self.generation_config = GenerationConfig()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CausalRefiner):
            init.zeros_(module.mixer)
        elif isinstance(module, LayerwiseFusion):
            init.copy_(module.mix, module.initial_mix())

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *args: Any,
        config: Any = None,
        tap_offset: int | None = None,
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Loads a drafter in any layout of `checkpoints.layouts` from a folder or a Hub id.

        Accepts the arguments of [`PreTrainedModel.from_pretrained`]; fields of the config given by name replace those
        of the checkpoint. Only safetensors are read; no remote code is run.

        Args:
            tap_offset: for speculators files, stored tap ids minus zero-based layers. Default 1; some recipes stored
                zero-based layers, which is 0.
            allow_pickle: reads the training file of xPress, by an unpickler that builds tensors and plain values only.

        Raises:
            ValueError: missing or unexpected weights (all listed), weights that are not finite or not those that were
                saved, a layout that is unknown or cannot be run faithfully.
            OSError: the folder or repository does not exist, has no config, or holds damaged files.
        """
        kwargs["use_safetensors"] = True
        if "torch_dtype" in kwargs:
            kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
        wants_info = kwargs.pop("output_loading_info", False)
        if isinstance(config, str | os.PathLike):
            config = XPressConfig.from_pretrained(config)
        overrides = {name: kwargs.pop(name) for name in CONFIG_FIELDS & set(kwargs)}
        source = pretrained_model_name_or_path
        checkpoint = open_checkpoint(source, kwargs, config, overrides, tap_offset, allow_pickle)
        checkpoint.report()
        if checkpoint.is_own:
            drafter, info = super().from_pretrained(
                source, *args, config=checkpoint.config, output_loading_info=True, **kwargs
            )
        else:
            drafter, info = cls._from_state_dict(checkpoint.state_dict(), checkpoint.config, **kwargs)
        drafter._check_loading(source, info)
        checkpoint.check_hashes()
        if find_file(source, GENERATION_CONFIG_NAME, kwargs) is not None:
            hub = {key: kwargs[key] for key in HUB_OPTIONS if kwargs.get(key) is not None}
            drafter.generation_config = GenerationConfig.from_pretrained(source, **hub)
        return (drafter, info) if wants_info else drafter

    @classmethod
    def _from_state_dict(
        cls, state_dict: dict[str, torch.Tensor], config: XPressConfig, **kwargs: Any
    ) -> tuple[XPressDrafter, dict]:
        unused = {*HUB_OPTIONS, "use_safetensors", "trust_remote_code"}
        options = {key: value for key, value in kwargs.items() if key not in unused}
        return super().from_pretrained(None, config=config, state_dict=state_dict, output_loading_info=True, **options)

    def _check_loading(self, source: Any, info: dict) -> None:
        problems = {
            key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]
        }
        if problems:
            listed = "; ".join(f"{key}: {value}" for key, value in problems.items())
            raise ValueError(
                f"Checkpoint {str(source)!r} does not hold the weights that its config describes. {listed}."
            )
        for name, parameter in self.named_parameters():
            if not torch.isfinite(parameter).all():
                raise ValueError(f"Checkpoint {str(source)!r} has values that are not finite in `{name}`.")

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As [`PreTrainedModel.save_pretrained`]; `speculation` goes into the config, limits of drafts and the hash of
        every tensor beside it."""
        push = kwargs.pop("push_to_hub", False)
        hub = {key: kwargs.pop(key) for key in PUSH_OPTIONS & set(kwargs)}
        self.config.speculation = self.speculation.to_dict() or None
        super().save_pretrained(save_directory, *args, **kwargs)
        if not kwargs.get("is_main_process", True):
            return
        limits = self.generation_config.num_assistant_tokens, self.generation_config.assistant_confidence_threshold
        if any(limit is not None for limit in limits):
            self.generation_config.save_pretrained(save_directory)
        else:
            # Limits that an earlier save left here would be read as this drafter's.
            (Path(save_directory) / GENERATION_CONFIG_NAME).unlink(missing_ok=True)
        write_hashes(save_directory)
        if push:
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)

    def forward(
        self,
        noise_embeds: torch.Tensor | None = None,
        context_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        objective: Callable[[torch.Tensor], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Args:
            noise_embeds: [B, K, H] target embeddings of the block: visible tokens, then the mask token.
            context_hidden_states: [B, S, L * H_target] concatenated taps of the rows not yet in the cache.
            attention_mask: [B, T] over cached rows, new context and block; or a dict of 4-D masks (see `Backbone`).
            position_ids: [B, S + K].
            cache: grows by S + K rows; the caller crops the block's K rows. `past_key_values` is its older name.
            objective: for training; called with the hidden states [B, K, H], what it returns is returned. A loss that
                runs inside the forward pass sees the refiner's weights whole where they are sharded.

        Returns:
            `BaseModelOutputWithPast` with `last_hidden_state` [B, K, H] after the final norm.

        Raises:
            ValueError: ids or embeddings without the target's hidden states were given.
        """
        if noise_embeds is None or context_hidden_states is None or position_ids is None:
            raise ValueError(
                "A drafter is no language model of its own: it needs `noise_embeds`, `context_hidden_states` and "
                f"`position_ids` (got arguments {sorted(kwargs)}). Use it as "
                "`target.generate(..., assistant_model=drafter)`."
            )
        cache = cache if cache is not None else past_key_values
        expected = len(self.config.target_layer_ids) * self.config.target_hidden_size
        if context_hidden_states.shape[-1] != expected:
            raise ValueError(
                f"`context_hidden_states` must be {expected} wide ({len(self.config.target_layer_ids)} taps x "
                f"{self.config.target_hidden_size}), got shape {tuple(context_hidden_states.shape)}."
            )
        if context_hidden_states.shape[1] == 0 and (cache is None or cache.get_seq_length() == 0):
            raise ValueError("`context_hidden_states` is empty: drafting without target features is meaningless.")
        dtype = self.backbone.norm.weight.dtype
        contexts = self.fusion(context_hidden_states.to(dtype))
        last_hidden_state = self.backbone(noise_embeds.to(dtype), contexts, position_ids, attention_mask, cache)
        if objective is not None:
            return objective(last_hidden_state)
        return BaseModelOutputWithPast(last_hidden_state=last_hidden_state)

    def generate(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "A drafter does not generate by itself; call `target.generate(..., assistant_model=drafter)`."
        )

    @property
    def num_sweeps(self) -> int:
        """Sweeps that generate() runs: `speculation.sweeps`, else the checkpoint's default, else 0."""
        if self.refiner is None:
            return 0
        return self.config.refiner["sweeps"] if self.speculation.sweeps is None else self.speculation.sweeps

    def describe(self) -> str:
        """One line: sizes and how it is run, for people."""
        config = self.config
        refiner = "no refiner" if self.refiner is None else f"refiner of rank {config.refiner['rank']}"
        return (
            f"{sum(p.numel() for p in self.parameters()) / 1e6:.1f} M parameters, {config.num_hidden_layers} layers, "
            f"block {config.block_size}, taps {config.target_layer_ids}, {refiner}, {self.num_sweeps} sweeps"
        )

    def new_cache(self) -> Cache:
        """A cache for the context rows of one sequence."""
        return DynamicCache()

    @torch.no_grad()
    def draft_block(
        self,
        target: Any,
        known_ids: torch.Tensor,
        context_hidden_states: torch.Tensor,
        cache: Cache,
        choose: Chooser = greedy_choice,
        position_ids: torch.Tensor | None = None,
        attention_mask: dict[str, torch.Tensor] | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> BlockDraft:
        """Drafts one block behind each row of `known_ids`.

        Args:
            target: a `decoding.target.Target`: `embed(ids)` and `logits(hidden_states)`.
            known_ids: [N, >= 1] committed tokens; the last is the anchor, the one before it the refiner's predecessor.
            context_hidden_states: [N, S, L * H_target] taps of the rows that the cache lacks, all before the anchor.
            cache: context rows of earlier cycles; afterwards it also holds the S new ones, never block rows.
            choose: picks a token per slot, see `refine_block`.
            position_ids: [N, S + B] of new context rows and block. Default: they follow the cached rows.
            attention_mask: additive masks per layer type, see `Backbone.forward`. Default: every context row counts.
            forward: what runs the backbone, as a compiled call of this drafter. Default: the drafter itself.
        """
        config = self.config
        device = self.device
        anchor = known_ids[:, -1:]
        masks = anchor.new_full((anchor.shape[0], config.block_size - 1), config.mask_token_id)
        if position_ids is None:
            start = cache.get_seq_length()
            num_rows = context_hidden_states.shape[1] + config.block_size
            position_ids = torch.arange(start, start + num_rows, device=device)[None]
        hidden_states = (forward or self)(
            noise_embeds=target.embed(torch.cat([anchor, masks], dim=1)).to(device),
            context_hidden_states=context_hidden_states.to(device),
            attention_mask=attention_mask,
            position_ids=position_ids.to(device),
            cache=cache,
        ).last_hidden_state
        cache.crop(-config.block_size)
        num_drafts = config.num_draft_tokens
        base_logits = target.logits(hidden_states[:, -num_drafts:]).to(device, torch.float32)
        if self.num_sweeps == 0:
            return BlockDraft(choose(base_logits, None), base_logits)
        # At the start of a sequence the anchor stands in for its missing predecessor.
        before = known_ids[:, -2:] if known_ids.shape[1] > 1 else anchor.expand(-1, 2)
        first_ids = (before if config.slot_layout == "fill" else anchor).to(device)
        ids, logits = refine_block(
            self.refiner,
            hidden_states,
            base_logits,
            first_ids,
            self.num_sweeps,
            choose,
            self.speculation.top_candidates,
        )
        return BlockDraft(ids, logits)


def is_drafter(model: Any) -> bool:
    """Whether `model` is an `XPressDrafter`, also inside a PEFT wrapper."""
    return isinstance(unwrap_drafter(model), XPressDrafter)


def unwrap_drafter(model: Any) -> Any:
    """The drafter inside `torch.compile`, data-parallel and PEFT wrappers; other objects as they are."""
    for name in ("_orig_mod", "module"):
        if isinstance(inner := getattr(model, name, None), nn.Module):
            model = inner
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model
