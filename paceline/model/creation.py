"""Creation of models, in one thread at a time.

While transformers creates a model, settings of the whole process are different, such as the default
dtype of torch. Two threads that do so at once leave each other's settings behind.
"""

from copy import deepcopy
from threading import RLock
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

CREATING = RLock()


def empty_model(config: PretrainedConfig, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Return the model of a configuration without memory for its weights.

    `kind`: an auto class of transformers.
    """
    with CREATING, torch.device("meta"):
        model: PreTrainedModel = kind.from_config(deepcopy(config))
    return model
