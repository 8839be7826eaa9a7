"""Read and write checkpoints in the released layout."""

import base64
import json
import os

import numpy as np
import torch

import mxfp4

PREFIX = "language_model."
DTYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "U8": np.dtype("u1")}
# Stored in float32; every other trunk tensor is bf16.
FLOAT32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
SPECIAL = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|end_of_msg|>", True),
    3: ("<|open|>", False),
    4: ("<|close|>", False),
    5: ("<|sep|>", False),
    6: ("[start_header_id]", True),
    7: ("[end_header_id]", True),
    9: ("[EOT]", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    65: ("<osagent_mode>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}


def released_name(name):
    """Name of a parameter of model.K3 in the checkpoint."""
    for part in ("self_attention_res", "mlp_res", "output_attn_res"):
        name = name.replace(part + ".norm", part + "_norm")
        name = name.replace(part + ".proj", part + "_proj")
    return PREFIX + (name if name.startswith("lm_head") else "model." + name)


def bf16_bits(t):
    return t.detach().bfloat16().view(torch.int16).numpy().view("<u2")


def tensors_of(model):
    """name -> (dtype, array) for everything that a checkpoint of the model holds."""
    out = {}
    head_dim = model.cfg["linear_attn_config"]["head_dim"]
    for name, t in model.state_dict().items():
        leaf = name.rsplit(".", 1)[1]
        if leaf in ("w1", "w2", "w3"):
            base = released_name(name.rsplit(".", 1)[0])
            packed, scale = mxfp4.pack(t)
            for e in range(t.shape[0]):
                path = "%s.experts.%d.%s" % (base, e, leaf)
                out[path + ".weight_packed"] = ("U8", packed[e].numpy())
                out[path + ".weight_scale"] = ("U8", scale[e].numpy())
            continue
        if leaf == "A_log":
            t = torch.nn.functional.pad(t, (0, head_dim - t.shape[0]))
        if name.endswith(FLOAT32):
            out[released_name(name)] = ("F32", t.detach().float().numpy())
        else:
            out[released_name(name)] = ("BF16", bf16_bits(t))
    return out


def shard_of(name, layers):
    parts = name.split(".layers.")
    return int(parts[1].split(".")[0]) if len(parts) == 2 else layers


def order_in_shard(name):
    """Trunk tensors first, then each expert's six as one run."""
    if ".experts." not in name:
        return (0, 0, name)
    return (1, int(name.split(".experts.")[1].split(".")[0]), name)


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, (dtype, array) in tensors:
        size = array.size * DTYPES[dtype].itemsize
        header[name] = {
            "dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, (dtype, array) in tensors:
            f.write(np.ascontiguousarray(array, DTYPES[dtype]).tobytes())
    return at


def write_model(model, folder, shards):
    """The layers are spread over `shards` files of about equal size, a layer never split; the
    model-level tensors close the last."""
    all_tensors = tensors_of(model)
    layers = model.cfg["num_hidden_layers"]
    total, where = 0, {}
    for s in range(shards):
        name = "model-%05d-of-%06d.safetensors" % (s + 1, shards)
        mine = [
            (n, t) for n, t in all_tensors.items()
            if shard_of(n, layers) * shards // (layers + 1) == s
        ]
        mine.sort(key=lambda item: (shard_of(item[0], layers),) + order_in_shard(item[0]))
        total += write_safetensors(os.path.join(folder, name), mine)
        where.update((n, name) for n, _ in mine)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump(index, f, indent=0, separators=(",", ":"))


def read_safetensors(path):
    with open(path, "rb") as f:
        data = f.read()
    size = int.from_bytes(data[:8], "little")
    for name, info in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        raw = np.frombuffer(data[8 + size + begin : 8 + size + end], DTYPES[info["dtype"]])
        if info["dtype"] == "BF16":
            raw = (raw.astype("<u4") << 16).view("<f4")
        yield name, torch.from_numpy(raw.reshape(info["shape"]).copy())


def read_config(folder):
    with open(os.path.join(folder, "config.json")) as f:
        return json.load(f)["text_config"]


def load_model(model, folder):
    """Fill the model, whatever its float type, with the exact stored values."""
    with open(os.path.join(folder, "model.safetensors.index.json")) as f:
        files = sorted(set(json.load(f)["weight_map"].values()))
    stored = {}
    for name in files:
        stored.update(read_safetensors(os.path.join(folder, name)))
    state = model.state_dict()
    for name, t in state.items():
        leaf = name.rsplit(".", 1)[1]
        if leaf in ("w1", "w2", "w3"):
            base = released_name(name.rsplit(".", 1)[0])
            for e in range(t.shape[0]):
                path = "%s.experts.%d.%s" % (base, e, leaf)
                t[e] = mxfp4.unpack(
                    stored[path + ".weight_packed"], stored[path + ".weight_scale"], t.dtype
                )
        elif leaf == "A_log":
            t.copy_(stored[released_name(name)][: t.shape[0]])
        else:
            t.copy_(stored[released_name(name)])
    model.load_state_dict(state)
    return model


def text_config(ranks, **size):
    """text_config of a model with the released conventions; size: the keys that differ."""
    mla = size["full_attn_layers"]
    cfg = {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": size["block"],
        "bos_token_id": ranks,
        "dtype": "bfloat16",
        "eos_token_id": ranks + 2,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": size["hidden"],
        "initializer_range": 0.02,
        "intermediate_size": size["dense"],
        "kv_lora_rank": size["kv_lora"],
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": mla,
            "gate_lower_bound": -5.0,
            "head_dim": size["kda_dim"],
            "kda_layers": [i for i in range(1, size["layers"] + 1) if i not in mla],
            "num_heads": size["kda_heads"],
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 4096,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": size["expert"],
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": size["mla_heads"],
        "num_expert_group": 1,
        "num_experts": size["experts"],
        "num_experts_per_token": size["top_k"],
        "num_hidden_layers": size["layers"],
        "num_key_value_heads": size["mla_heads"],
        "num_nextn_predict_layers": 0,
        "num_shared_experts": size["shared"],
        "pad_token_id": ranks + 255,
        "q_lora_rank": size["q_lora"],
        "qk_nope_head_dim": size["nope"],
        "qk_rope_head_dim": size["rope"],
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": mxfp4.GROUP,
                        "num_bits": 4,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "scale_dtype": "torch.uint8",
                        "strategy": "group",
                        "symmetric": True,
                        "type": "float",
                        "zp_dtype": None,
                    },
                }
            },
            "format": "mxfp4-pack-quantized",
            "global_compression_ratio": None,
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "re:.*lm_head.*",
                "re:.*vision_tower.*",
                "re:.*mm_projector.*",
            ],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": size["latent"],
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": size["v_dim"],
        "vocab_size": ranks + 256,
    }
    return cfg


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


def write_config(folder, cfg, ranks):
    """config.json, generation_config.json, tiktoken.model and tokenizer_config.json."""
    first = len(ranks)
    write_json(folder, "config.json", {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "bos_token_id": first,
        "dtype": "bfloat16",
        "eos_token_id": first + 2,
        "ignore_index": -100,
        "media_placeholder_token_id": first + 21,
        "model_type": "kimi_k3",
        "pad_token_id": first + 255,
        "text_config": cfg,
        "tie_word_embeddings": False,
    })
    write_json(folder, "generation_config.json",
               {"eos_token_id": first + 2, "max_length": cfg["max_position_embeddings"]})
    with open(os.path.join(folder, "tiktoken.model"), "wb") as f:
        for rank, token in enumerate(ranks):
            f.write(base64.b64encode(token) + b" %d\n" % rank)
    write_json(folder, "tokenizer_config.json", {
        "added_tokens_decoder": {
            str(first + i): {
                "content": name, "lstrip": False, "normalized": False, "rstrip": False,
                "single_word": False, "special": flag,
            }
            for i, (name, flag) in SPECIAL.items()
        },
        "additional_special_tokens": [name for name, flag in SPECIAL.values()],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "model_max_length": cfg["max_position_embeddings"],
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    })
