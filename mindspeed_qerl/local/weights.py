"""A Hugging Face checkpoint, compared with its config.json, and loaded into a rank's part of a Megatron model."""

from collections.abc import Iterable

import torch
from safetensors.torch import _getdtype

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.families import ModelShape, family_of, read_config
from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.families.tensors import Mapping


def check_tensors(checkpoint: Checkpoint, shape: ModelShape, tensors: Iterable[str] = ()) -> None:
    """ConfigError unless `checkpoint` is of the model that its config.json describes: a tensor is missing, is more
    than it calls for, has another dtype (those named `tensors`), is an output layer of its own beside a tied
    embedding, or holds other rotary frequencies."""
    directory, called_for = checkpoint.directory, {
        name for mapping in family_of(shape).tensors(shape, range(shape.num_hidden_layers), range(shape.num_experts))
        for name in mapping.hf}
    if missing := sorted(called_for - set(checkpoint.files)):
        tied = ", or set tie_word_embeddings" if missing == ["lm_head.weight"] else ""
        raise ConfigError(f"{directory} has no tensor {missing[0]!r}, which config.json calls for ({len(missing)} are "
                          f"missing). Fetch the whole model{tied}")
    for name in sorted(set(checkpoint.files) - called_for):
        if name == "lm_head.weight" and shape.tie_word_embeddings:
            if not torch.equal(checkpoint.read(name), checkpoint.read("model.embed_tokens.weight")):
                raise ConfigError(f"{directory}: config.json has tie_word_embeddings = true, but lm_head.weight "
                                  "differs from model.embed_tokens.weight: set it to false")
        elif name.endswith("rotary_emb.inv_freq"):
            expected = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
            found = checkpoint.read(name).float()
            if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-2):
                raise ConfigError(f"{directory}: {name} is not what rope_theta = {shape.rope_theta:g} and head_dim = "
                                  f"{shape.head_dim} in config.json give: one of them is of another model")
        else:
            raise ConfigError(f"{directory} has a tensor {name!r}, which config.json does not call for: it is of "
                              "another model (more layers or experts, a bias?)")
    config = read_config(directory / "config.json")
    said = config.get("dtype") or config.get("torch_dtype")
    for name in tensors:
        found = _getdtype(checkpoint.header(name).get_dtype())
        kind = str(found).removeprefix("torch.")
        if not found.is_floating_point or found.itemsize < 2:
            raise ConfigError(f"{directory}: {name} is {kind}; give the model in bfloat16, float16 or float32, not "
                              "quantised")
        if said and kind != said:
            raise ConfigError(f"{directory}: {name} is {kind} and config.json says {said}: one of them is of another "
                              "model")


@torch.no_grad()
def load_weights(model: torch.nn.Module, table: Iterable[Mapping], checkpoint: Checkpoint, tp_rank: int = 0,
                 tp_size: int = 1) -> None:
    """Fill every parameter of `model` with this rank's part of `checkpoint`; holds one whole Megatron tensor beside
    the model at a time. ConfigError if one is missing, has another shape, or is not in the table."""
    parameters = dict(model.named_parameters())
    for mapping in table:
        parameter = parameters.pop(mapping.megatron)
        value = mapping.merge([checkpoint.read(name) for name in mapping.hf])
        if mapping.shared:
            value = mapping.shared.shard(value, tp_rank, tp_size)
        if value.shape != parameter.shape:
            raise ConfigError(f"{' + '.join(mapping.hf)} in {checkpoint.directory} gives shape {tuple(value.shape)}, "
                              f"the model's config.json calls for {tuple(parameter.shape)}")
        parameter.copy_(value)
    if parameters:
        raise ConfigError(f"no Hugging Face tensor is known for the parameters {', '.join(sorted(parameters)[:5])}")
