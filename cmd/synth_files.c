/* cmd/synth_files.c - presets, and the small files of a checkpoint. */
#include "synth.h"

#include <stdlib.h>
#include <string.h>

/* Widths of the released model, and of one that is small but exercises every part: heads of another
 * number than their width, two blocks and a rest of the attention residuals, two MLA layers at the end. */
static const sl_config k3_preset = {
    .vocab = 163840, .hidden = 7168, .layers = 93, .eps = 1e-5f, .res_block = 12, .situ_beta = 4,
    .situ_linear_beta = 25, .dense_layers = 1, .intermediate = 33792, .experts = 896, .top_k = 16,
    .shared_experts = 2, .moe_intermediate = 3072, .latent = 3584, .latent_projection = true, .latent_norm = true,
    .renormalize = true, .routed_scale = 1, .heads = 96, .q_lora = 1536, .kv_lora = 512, .nope = 128, .rope = 64,
    .v_dim = 128, .mla_gate = true, .kda_heads = 96, .kda_dim = 128, .conv_taps = 4, .gate_lower_bound = -5,
    .full_rank_gate = true,
};
static const sl_config tiny_preset = {
    .vocab = 512, .hidden = 128, .layers = 9, .eps = 1e-5f, .res_block = 4, .situ_beta = 4,
    .situ_linear_beta = 25, .dense_layers = 1, .intermediate = 224, .experts = 16, .top_k = 4,
    .shared_experts = 2, .moe_intermediate = 64, .latent = 96, .latent_projection = true, .latent_norm = true,
    .renormalize = true, .routed_scale = 1, .heads = 4, .q_lora = 48, .kv_lora = 32, .nope = 24, .rope = 8,
    .v_dim = 24, .mla_gate = true, .kda_heads = 5, .kda_dim = 24, .conv_taps = 4, .gate_lower_bound = -5,
    .full_rank_gate = true,
};

/* Ids of the named special tokens, counted from the first; the others are reserved. */
static const struct {
    uint32_t id;
    bool special;
    const char *name;
} specials[] = {
    { 0, true, "[BOS]" }, { 1, true, "[EOS]" }, { 2, true, "<|end_of_msg|>" }, { 3, false, "<|open|>" },
    { 4, false, "<|close|>" }, { 5, false, "<|sep|>" }, { 6, true, "[start_header_id]" },
    { 7, true, "[end_header_id]" }, { 9, true, "[EOT]" }, { 18, true, "<|media_begin|>" },
    { 19, true, "<|media_content|>" }, { 20, true, "<|media_end|>" }, { 21, true, "<|media_pad|>" },
    { 65, true, "<osagent_mode>" }, { 254, true, "[UNK]" }, { 255, true, "[PAD]" },
};
enum { BOS = 0, END_OF_MSG = 2, MEDIA_PAD = 21, PAD = 255 };

static uint32_t ranks(const synth_model *m) { return m->config.vocab - SYNTH_SPECIALS; }

/* ---- config.json ------------------------------------------------------------------------------ */

static const char *boolean(bool b) { return b ? "true" : "false"; }

static void layer_list(FILE *f, const sl_config *c, bool mla)
{
    const char *comma = "";
    putc('[', f);
    for (uint32_t l = 0; l < c->layers; l++)
        if (c->is_mla[l] == mla) {
            fprintf(f, "%s%u", comma, l + 1);
            comma = ", ";
        }
    putc(']', f);
}

static void attention_json(FILE *f, const sl_config *c)
{
    fprintf(f,
            "    \"num_attention_heads\": %u,\n    \"num_key_value_heads\": %u,\n    \"q_lora_rank\": %u,\n"
            "    \"kv_lora_rank\": %u,\n    \"qk_nope_head_dim\": %u,\n    \"qk_rope_head_dim\": %u,\n"
            "    \"v_head_dim\": %u,\n    \"mla_use_nope\": true,\n    \"mla_use_output_gate\": %s,\n",
            c->heads, c->heads, c->q_lora, c->kv_lora, c->nope, c->rope, c->v_dim, boolean(c->mla_gate));
    fprintf(f,
            "    \"linear_attn_config\": {\n      \"num_heads\": %u,\n      \"head_dim\": %u,\n"
            "      \"short_conv_kernel_size\": %u,\n      \"gate_lower_bound\": %.1f,\n"
            "      \"use_full_rank_gate\": %s,\n      \"full_attn_layers\": ",
            c->kda_heads, c->kda_dim, c->conv_taps, (double)c->gate_lower_bound, boolean(c->full_rank_gate));
    layer_list(f, c, true);
    fputs(",\n      \"kda_layers\": ", f);
    layer_list(f, c, false);
    fputs("\n    },\n", f);
}

static void moe_json(FILE *f, const sl_config *c)
{
    fprintf(f,
            "    \"intermediate_size\": %u,\n    \"first_k_dense_replace\": %u,\n    \"moe_layer_freq\": 1,\n"
            "    \"num_experts\": %u,\n    \"num_experts_per_token\": %u,\n    \"num_shared_experts\": %u,\n"
            "    \"moe_intermediate_size\": %u,\n    \"routed_expert_hidden_size\": %u,\n"
            "    \"latent_moe_use_norm\": %s,\n    \"moe_router_activation_func\": \"sigmoid\",\n"
            "    \"moe_renormalize\": %s,\n    \"routed_scaling_factor\": %.1f,\n    \"topk_method\": \"noaux_tc\",\n"
            "    \"use_grouped_topk\": true,\n    \"num_expert_group\": 1,\n    \"topk_group\": 1,\n",
            c->intermediate, c->dense_layers, c->experts, c->top_k, c->shared_experts, c->moe_intermediate,
            c->latent, boolean(c->latent_norm), boolean(c->renormalize), (double)c->routed_scale);
}

static const char quantization[] =
    "    \"quantization_config\": {\n"
    "      \"quant_method\": \"compressed-tensors\",\n"
    "      \"format\": \"mxfp4-pack-quantized\",\n"
    "      \"quantization_status\": \"compressed\",\n"
    "      \"global_compression_ratio\": null,\n"
    "      \"kv_cache_scheme\": null,\n"
    "      \"config_groups\": {\"group_0\": {\n"
    "        \"format\": \"mxfp4-pack-quantized\", \"targets\": [\"Linear\"],\n"
    "        \"input_activations\": null, \"output_activations\": null,\n"
    "        \"weights\": {\"num_bits\": 4, \"type\": \"float\", \"symmetric\": true, \"strategy\": \"group\",\n"
    "          \"group_size\": 32, \"dynamic\": false, \"observer\": \"minmax\", \"observer_kwargs\": {},\n"
    "          \"scale_dtype\": \"torch.uint8\", \"actorder\": null, \"block_structure\": null, \"zp_dtype\": null}}},\n"
    "      \"ignore\": [\"re:.*self_attn.*\", \"re:.*shared_experts.*\",\n"
    "        \"re:.*mlp\\\\.(gate|up|gate_up|down)_proj.*\", \"re:.*lm_head.*\", \"re:.*vision_tower.*\",\n"
    "        \"re:.*mm_projector.*\"]\n"
    "    },\n";

/* Defaults of the format that have no influence on inference. */
static const char unused[] =
    "    \"_name_or_path\": \"\", \"add_cross_attention\": false, \"bad_words_ids\": null,\n"
    "    \"begin_suppress_tokens\": null, \"chunk_size_feed_forward\": 0, \"cross_attention_hidden_size\": null,\n"
    "    \"decoder_start_token_id\": null, \"diversity_penalty\": 0.0, \"do_sample\": false, \"dtype\": \"bfloat16\",\n"
    "    \"early_stopping\": false, \"encoder_no_repeat_ngram_size\": 0, \"exponential_decay_length_penalty\": null,\n"
    "    \"finetuning_task\": null, \"forced_bos_token_id\": null, \"forced_eos_token_id\": null,\n"
    "    \"id2label\": {\"0\": \"LABEL_0\", \"1\": \"LABEL_1\"}, \"initializer_range\": 0.02, \"is_decoder\": false,\n"
    "    \"is_encoder_decoder\": false, \"label2id\": {\"LABEL_0\": 0, \"LABEL_1\": 1}, \"length_penalty\": 1.0,\n"
    "    \"max_length\": 20, \"min_length\": 0, \"no_repeat_ngram_size\": 0, \"num_beam_groups\": 1, \"num_beams\": 1,\n"
    "    \"num_return_sequences\": 1, \"output_attentions\": false, \"output_hidden_states\": false,\n"
    "    \"output_scores\": false, \"prefix\": null, \"problem_type\": null, \"pruned_heads\": {},\n"
    "    \"remove_invalid_values\": false, \"repetition_penalty\": 1.0, \"return_dict\": true,\n"
    "    \"return_dict_in_generate\": false, \"sep_token_id\": null, \"suppress_tokens\": null,\n"
    "    \"task_specific_params\": null, \"temperature\": 1.0, \"tf_legacy_loss\": false,\n"
    "    \"tie_encoder_decoder\": false, \"tokenizer_class\": null, \"top_k\": 50, \"top_p\": 1.0,\n"
    "    \"torchscript\": false, \"transformers_version\": \"4.56.2\", \"typical_p\": 1.0, \"use_bfloat16\": false,\n"
    "    \"use_cache\": true,\n";

static const char auto_map[] =
    "\"auto_map\": {\n"
    "    \"AutoConfig\": \"configuration_kimi_k3.KimiK3Config\",\n"
    "    \"AutoModel\": \"modeling_kimi_k3.KimiK3ForConditionalGeneration\",\n"
    "    \"AutoModelForCausalLM\": \"modeling_kimi_k3.KimiK3ForConditionalGeneration\"\n  },\n";

static const char vision[] =
    "  \"vision_config\": {\n"
    "    \"patch_size\": 14, \"init_pos_emb_height\": 64, \"init_pos_emb_width\": 64, \"init_pos_emb_time\": 4,\n"
    "    \"pos_emb_type\": \"divided_fixed\", \"pos_emb_interpolation_mode\": \"bilinear\",\n"
    "    \"vt_num_attention_heads\": 12, \"vt_num_hidden_layers\": 27, \"vt_hidden_size\": 1024,\n"
    "    \"vt_intermediate_size\": 4096, \"qkv_hidden_size\": 1536, \"merge_kernel_size\": [2, 2],\n"
    "    \"merge_type\": \"sd2_tpool\", \"norm_type\": \"rmsnorm\", \"mlp_type\": \"mlp2\", \"attn_bias\": false,\n"
    "    \"linear_bias\": false, \"patch_embed_proj_bias\": false, \"activation_func\": \"gelu_pytorch_tanh\",\n"
    "    \"mm_projector_type\": \"patchmergerv2\", \"mm_hidden_size\": 1024, \"text_hidden_size\": 7168,\n"
    "    \"projector_hidden_act\": \"gelu\", \"projector_ln_eps\": 1e-05,\n"
    "    \"_attn_implementation\": \"flash_attention_2\"\n  },\n";

static void token_ids(FILE *f, const synth_model *m, const char *indent)
{
    const uint32_t first = ranks(m);
    fprintf(f, "%s\"bos_token_id\": %u,\n%s\"eos_token_id\": %u,\n%s\"pad_token_id\": %u,\n", indent, first + BOS,
            indent, first + END_OF_MSG, indent, first + PAD);
}

void synth_config_json(FILE *f, const synth_model *m)
{
    const sl_config *c = &m->config;
    fprintf(f, "{\n  \"architectures\": [\"KimiK3ForConditionalGeneration\"],\n  \"model_type\": \"kimi_k3\",\n  %s%s",
            auto_map, "  \"dtype\": \"bfloat16\",\n");
    token_ids(f, m, "  ");
    fprintf(f,
            "  \"ignore_index\": -100,\n  \"image_placeholder\": \"<|kimi_image_placeholder|>\",\n"
            "  \"media_placeholder_token_id\": %u,\n  \"tie_word_embeddings\": false,\n%s  \"text_config\": {\n",
            ranks(m) + MEDIA_PAD, m->released ? vision : "");
    fprintf(f,
            "    \"architectures\": [\"KimiLinearForCausalLM\"],\n    \"model_type\": \"kimi_linear\",\n"
            "    \"vocab_size\": %u,\n    \"hidden_size\": %u,\n    \"num_hidden_layers\": %u,\n"
            "    \"rms_norm_eps\": %g,\n    \"hidden_act\": \"situ\",\n    \"activation_situ_beta\": %.1f,\n"
            "    \"activation_situ_linear_beta\": %.1f,\n",
            c->vocab, c->hidden, c->layers, (double)c->eps, (double)c->situ_beta, (double)c->situ_linear_beta);
    if (c->res_block)
        fprintf(f, "    \"attn_res_block_size\": %u,\n", c->res_block);
    else
        fputs("    \"attn_res_block_size\": null,\n", f);
    moe_json(f, c);
    attention_json(f, c);
    token_ids(f, m, "    ");
    fprintf(f, "%s    %s%s", quantization, auto_map, unused);
    fputs("    \"num_nextn_predict_layers\": 0,\n    \"max_position_embeddings\": 1048576,\n"
          "    \"tie_word_embeddings\": false\n  }\n}\n", f);
}

static int spread_layers(sl_config *c, const synth_options *opt, sl_err *err)
{
    memset(c->is_mla, 0, sizeof c->is_mla);
    if (c->layers > SL_LAYERS_MAX)
        return sl_fail(err, SL_EUSAGE, "--layers: found %u, expected at most %d", c->layers, SL_LAYERS_MAX);
    if (!opt->full_attn)
        for (uint32_t l = 0; l < c->layers; l++)
            c->is_mla[l] = (l + 1) % 4 == 0 || l + 1 == c->layers;
    for (size_t i = 0; opt->full_attn && i < opt->n_full_attn; i++) {
        const int32_t l = opt->full_attn[i];
        if (l < 1 || (uint32_t)l > c->layers || c->is_mla[l - 1])
            return sl_fail(err, SL_EUSAGE, "--full-attn: found %d, expected different layers from 1 to %u", l, c->layers);
        c->is_mla[l - 1] = true;
    }
    return 0;
}

static uint32_t given(uint32_t value, uint32_t preset) { return value == UINT32_MAX ? preset : value; }

int synth_model_init(synth_model *m, const synth_options *opt, sl_err *err)
{
    const sl_config *preset = opt->k3 ? &k3_preset : &tiny_preset;
    sl_config c = *preset;
    *m = (synth_model){ .seed = opt->seed };
    c.layers = given(opt->layers, c.layers);
    c.experts = given(opt->experts, c.experts);
    c.vocab = given(opt->vocab, c.vocab);
    c.res_block = given(opt->res_block, c.res_block);
    if (c.experts && c.experts < c.top_k)
        c.top_k = c.experts; /* a smaller model than the preset's, not a contradiction */
    int rc = spread_layers(&c, opt, err);
    if (rc < 0)
        return rc;
    if (c.vocab < 256 + SYNTH_SPECIALS)
        return sl_fail(err, SL_EUSAGE, "--vocab: found %u, expected at least %d (256 bytes, %d special ids)", c.vocab,
                       256 + SYNTH_SPECIALS, SYNTH_SPECIALS);
    m->released = opt->k3 && c.layers == preset->layers && c.experts == preset->experts && c.vocab == preset->vocab;
    m->shards = c.layers + (m->released ? 3 : 1);
    m->config = c;
    char *text = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&text, &len);
    if (!f)
        return sl_fail(err, SL_EFAIL, "out of memory");
    synth_config_json(f, m);
    rc = fclose(f) != 0 ? sl_fail(err, SL_EFAIL, "out of memory") : sl_config_parse(&m->config, text, len, "config.json", err);
    free(text);
    return rc == SL_EFORMAT ? err->code = SL_EUSAGE : rc;
}

/* ---- tokenizer -------------------------------------------------------------------------------- */

void synth_generation_json(FILE *f, const synth_model *m)
{
    fprintf(f, "{\n  \"eos_token_id\": %u,\n  \"max_length\": 1048576\n}\n", ranks(m) + END_OF_MSG);
}

void synth_tokenizer_json(FILE *f, const synth_model *m)
{
    fputs("{\n  \"added_tokens_decoder\": {", f);
    for (size_t i = 0; i < sizeof specials / sizeof *specials; i++)
        fprintf(f,
                "%s\n    \"%u\": {\"content\": \"%s\", \"lstrip\": false, \"normalized\": false, \"rstrip\": false,"
                " \"single_word\": false, \"special\": %s}",
                i ? "," : "", ranks(m) + specials[i].id, specials[i].name, boolean(specials[i].special));
    fputs("\n  },\n  \"bos_token\": \"[BOS]\",\n  \"eos_token\": \"[EOS]\",\n  \"pad_token\": \"[PAD]\",\n"
          "  \"unk_token\": \"[UNK]\",\n  \"tokenizer_class\": \"TikTokenTokenizer\"\n}\n", f);
}

/* The single bytes in the order of GPT-2: printable ones, then the rest. */
static void byte_order(uint8_t order[256])
{
    unsigned n = 0;
    for (int printable = 1; printable >= 0; printable--)
        for (unsigned b = 0; b < 256; b++)
            if (((b >= 33 && b <= 126) || (b >= 161 && b != 173)) == printable)
                order[n++] = (uint8_t)b;
}

static void base64(FILE *f, const uint8_t *p, unsigned n)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (unsigned i = 0; i < n; i += 3) {
        const uint32_t left = n - i, bits = (uint32_t)p[i] << 16 | (left > 1 ? (uint32_t)p[i + 1] << 8 : 0) |
                                            (left > 2 ? p[i + 2] : 0);
        putc(digit[bits >> 18], f);
        putc(digit[bits >> 12 & 63], f);
        putc(left > 1 ? digit[bits >> 6 & 63] : '=', f);
        putc(left > 2 ? digit[bits & 63] : '=', f);
    }
}

/* Bytes, then all pairs of bytes, then triples, each group with the last byte counting slowest: distinct,
 * and each begins with an earlier rank, so that merges reach many of them. */
void synth_ranks(FILE *f, const synth_model *m)
{
    uint8_t order[256], token[4];
    byte_order(order);
    uint32_t first = 0, size = 256; /* of the tokens of this length */
    unsigned length = 1;
    for (uint32_t rank = 0; rank < ranks(m); rank++) {
        if (rank - first == size) {
            first = rank;
            size *= 256;
            length++;
        }
        for (uint32_t i = 0, n = rank - first; i < length; i++, n /= 256)
            token[i] = order[n % 256];
        base64(f, token, length);
        fprintf(f, " %u\n", rank);
    }
}
