"""Registers the model type with the Auto classes, and the push with the drafter."""

from __future__ import annotations

import logging

from transformers import AutoConfig, AutoModel

from .configuration import XPressConfig
from .hub import push_to_hub
from .modeling.drafter import XPressDrafter

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes AutoConfig and AutoModel know `xpress`. A clash with another owner of the name warns and leaves
    `XPressDrafter.from_pretrained` working."""
    # The card stands above the model, which therefore cannot import it.
    XPressDrafter.push_to_hub = push_to_hub
    try:
        AutoConfig.register(XPressConfig.model_type, XPressConfig, exist_ok=True)
        AutoModel.register(XPressConfig, XPressDrafter, exist_ok=True)
    except ValueError as error:
        logger.warning("model type %r is taken (%s); load drafters with XPressDrafter", XPressConfig.model_type, error)
