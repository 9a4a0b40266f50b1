"""Models in GGUF format: a GGUF file, or a directory with one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.data import tiny
from paceline.data.tiny import resolve_model
from paceline.errors import ModelError
from paceline.model import loading
from paceline.model.loading import (
    load_generation_config,
    load_model,
    load_tokenizer,
    model_fingerprint,
)
from paceline.training.settings import TrainSettings
from paceline.training.single import SingleDevice

gguf = pytest.importorskip("gguf")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
}


def write(file: Path, model: torch.nn.Module, tokenizer: "tiny.PreTrainedTokenizerFast") -> None:
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    # The format requires at least one merge.
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            for transformers_name, gguf_name in NAMES.items():
                name = name.replace(transformers_name, gguf_name)
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_gives_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        loading,
        "_read_config",
        lambda source, original=loading._read_config: read.append(source) or original(source),
    )
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(replace(tiny.Recipe("sort:5"), max_steps=2, hidden=192), tokenizer)
    write(tmp_path / "tiny.gguf", model, tokenizer)
    loaded = load_model(str(tmp_path))
    ids = torch.tensor([tokenizer("sort 31=").input_ids])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    text = load_tokenizer(str(tmp_path)).decode(ids[0].tolist(), skip_special_tokens=True)
    assert text == "sort 31="
    assert len(model_fingerprint(str(tmp_path))) == 64
    assert len(read) == 1, "reading the configuration takes seconds, so it must happen once"
    assert "GGUF" not in capsys.readouterr().err, (
        "the log of a worker must not contain a progress bar"
    )
    # The model can be trained, and is saved in the format of transformers.
    SingleDevice(loaded, TrainSettings()).save(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(str(tmp_path / "actor"))(ids).logits, model(ids).logits
        )


def test_gguf_file_is_selected_by_path_when_directory_has_several(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer()
    models = {
        name: tiny.make_model(replace(tiny.Recipe("sort:5"), max_steps=1, seed=seed), tokenizer)
        for seed, name in enumerate(("a.gguf", "b [q4].gguf"))
    }
    for name, model in models.items():
        write(tmp_path / name, model, tokenizer)
    with pytest.raises(ModelError, match=r"2 GGUF files; select one: model=.*\.gguf"):
        load_model(str(tmp_path))
    ids = torch.tensor([tokenizer("sort 31=").input_ids])
    for name, model in models.items():
        source = resolve_model(str(tmp_path / name))
        with torch.no_grad():
            torch.testing.assert_close(load_model(source)(ids).logits, model(ids).logits)
        assert load_tokenizer(source).decode(ids[0, 1:].tolist()) == "sort 31="
        assert load_generation_config(source).eos_token_id == 2
    first, second = (model_fingerprint(str(tmp_path / name)) for name in models)
    assert first != second
