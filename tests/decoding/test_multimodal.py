"""Targets that read images: the prompt may hold them, for one sequence and for a ragged batch. (G9)"""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from tests.conftest import COMMON, OLD, build_drafter, plain, prompt, scale_matrices
from tests.decoding.test_batches import oracle

NEW = 20
# Every image of every family below takes four tokens between its start and its end.
START, END, IMAGE, VIDEO = 58, 59, 60, 61
TEXT = {key: value for key, value in COMMON.items() if key != "tie_word_embeddings"}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}
AXES = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
MARKS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}

CONFIGS = {
    # Three position axes per token, which part at images; the third one also feeds early layers of the text model.
    "qwen2_vl": MARKS
    | {"text_config": TEXT | {"rope_parameters": ROPE}}
    | {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}},
    "qwen2_5_vl": MARKS
    | {"text_config": TEXT | {"rope_parameters": ROPE}}
    | {"vision_config": AXES | {"window_size": 16, "fullatt_block_indexes": [1]}},
    "qwen3_vl": MARKS
    | {"text_config": TEXT | {"head_dim": 8, "rope_parameters": ROPE | {"mrope_interleaved": True}}}
    | {"vision_config": AXES | {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
    "glm4v": {"image_token_id": IMAGE, "image_start_token_id": START, "image_end_token_id": END}
    | {"text_config": TEXT | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}}
    | {"vision_config": AXES | {"image_size": 16}},
    # Image tokens see each other in both directions; windowed layers.
    "gemma3": {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END, "mm_tokens_per_image": 4}
    | {"text_config": TEXT | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}}
    | {"vision_config": VISION | {"image_size": 16}},
    # Positions are counted from one.
    "paligemma": {"image_token_index": IMAGE, "projection_dim": 32, "text_config": TEXT | {"model_type": "gemma"}}
    | {"vision_config": VISION | {"model_type": "siglip_vision_model", "projection_dim": 32}},
    "llava": {"image_token_index": IMAGE, "vision_feature_layer": -1, "text_config": TEXT | {"model_type": "llama"}}
    | {"vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 32}},
    "idefics3": {"image_token_id": IMAGE, "scale_factor": 1, "vision_config": VISION}
    | {"text_config": TEXT | {"model_type": "llama"}},
    "internvl": {"image_token_id": IMAGE, "downsample_ratio": 0.5, "text_config": TEXT | {"model_type": "qwen2"}}
    | {"vision_config": VISION | {"image_size": [8, 8], "patch_size": [2, 2]}},
    "mistral3": {"image_token_index": IMAGE, "spatial_merge_size": 2}
    | {"text_config": TEXT | {"model_type": "mistral", "sliding_window": 8}}
    | {"vision_config": VISION | {"model_type": "pixtral", "patch_size": 2, "head_dim": 16}},
    # Layers that attend to the image alone.
    "mllama": {"image_token_index": IMAGE}
    | {"text_config": TEXT | {"cross_attention_layers": [1], "bos_token_id": 0}}
    | {"vision_config": VISION | {"num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64}},
}
CONFIGS["mllama"]["vision_config"] |= {"intermediate_layers_indices": [0], "max_num_tiles": 1}
CONFIGS["mllama"]["vision_config"] |= {"supported_aspect_ratios": [[1, 1]]}
SERVED = [family for family in CONFIGS if family != "mllama"]
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
LENGTHS = {"one": (9,), "ragged": (9, 4)}


def build(family, rows=1):
    if OLD and rows > 1 and family in GRIDS:
        pytest.skip("transformers 5.17 hands the grids of images to every forward, which a batch refuses by name")
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **CONFIGS[family])
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    scale_matrices(model, 4.0)
    # Norms of the text model make much of its own embeddings: images have to be as loud to matter.
    if family == "gemma3":
        # It starts at zero.
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    if family in ("gemma3", "mistral3"):
        scale_matrices(model.model.multi_modal_projector, 30.0)
    return model


def pixels(family, images, seed=0):
    """Pixels of as many images, as the processor of the family would give them."""
    draws = torch.Generator().manual_seed(seed)
    if family in GRIDS:
        grid = torch.tensor([[1, 4, 4]]).expand(images, -1)
        return {"pixel_values": 5 * torch.randn(16 * images, 96, generator=draws), "image_grid_thw": grid}
    size = 16 if family == "gemma3" else 8
    values = 5 * torch.randn(images, 3, size, size, generator=draws)
    if family == "idefics3":
        return {"pixel_values": values[:, None]}
    sizes = {"image_sizes": torch.tensor([[size, size]] * images)} if family == "mistral3" else {}
    return {"pixel_values": values, **sizes}


def inputs(family, lengths, with_images, seed=0):
    """Left-padded ids of prompts with an image behind the second token, the other inputs, and the prompts alone."""
    image = torch.tensor([[START, *[IMAGE] * 4, END]])
    prompts = [prompt(length, number, vocab=50) + 2 for number, length in enumerate(lengths)]
    if with_images:
        prompts = [torch.cat([one[:, :2], image, one[:, 2:]], dim=1) for one in prompts]
    width = max(one.shape[1] for one in prompts)
    ids = torch.cat([torch.nn.functional.pad(one, (width - one.shape[1], 0)) for one in prompts])
    given = {"attention_mask": (ids != 0).long(), "pad_token_id": 0, "max_new_tokens": NEW, "do_sample": False}
    if with_images:
        given |= pixels(family, len(prompts), seed)
        kinds = {"gemma3": "token_type_ids", "paligemma": "token_type_ids"}
        if family in (*GRIDS, *kinds):
            given[kinds.get(family, "mm_token_type_ids")] = (ids == IMAGE).long()
    return ids, given, prompts


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("family", SERVED)
def test_g9_ids_behind_an_image_are_those_of_plain_generate(family, lengths):
    target = build(family, len(LENGTHS[lengths]))
    ids, given, prompts = inputs(family, LENGTHS[lengths], True)
    expected = target.generate(ids, **given)
    if len(prompts) == 1:
        options = {**given, "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
        laws = [target.generate(ids, **options | pixels(family, 1, seed)).logits[0].softmax(-1) for seed in (0, 1)]
        assert (laws[0] - laws[1]).abs().max() > 1e-4, "the text must depend on the image"
    assert_equal_to_plain(target, ids, given, prompts, expected)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "llava"])
def test_g9_ids_behind_text_alone_are_those_of_plain_generate(family):
    target = build(family)
    ids, given, prompts = inputs(family, LENGTHS["ragged"], False)
    assert_equal_to_plain(target, ids, given, prompts, target.generate(ids, **given))


def assert_equal_to_plain(target, ids, given, prompts, expected):
    drafters = [build_drafter(), oracle(target, prompts, expected)]
    for drafter in drafters:
        assert torch.equal(target.generate(ids, assistant_model=drafter, **given), expected)
    assert 2 < drafters[1].last_acceptance.acceptance_length < 7


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "llava"])
def test_rows_with_and_without_an_image(family):
    """Each row is what it would be alone, wherever its image lies and whether it has one."""
    target = build(family, 2)
    _, given, (seen, _) = inputs(family, (9, 4), True)
    text = prompt(6, 3, vocab=50) + 2
    mixed = torch.cat([seen, torch.nn.functional.pad(text, (seen.shape[1] - 6, 0))])
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in given:
            given[name] = (mixed == IMAGE).long()
    given |= {"attention_mask": (mixed != 0).long(), **pixels(family, 1)}
    alone_ids, alone, _ = inputs(family, (9,), True)
    rows = [target.generate(alone_ids, **alone)[0], plain(target, text, max_new_tokens=NEW)[0]]
    drafter = oracle(target, [seen, text], target.generate(mixed, **given))
    out = target.generate(mixed, assistant_model=drafter, **given)
    for got, row, length in zip(out, rows, (seen.shape[1], 6), strict=True):
        assert torch.equal(got[seen.shape[1] :], row[length:])
    assert drafter.last_acceptance.acceptance_length > 2


def test_taps_are_outputs_of_the_language_model():
    """Not of the image encoder, whose layers are modules of the same kind of list."""
    target = build("qwen2_5_vl")
    ids, given, _ = inputs("qwen2_5_vl", (9,), True)
    outputs = {}
    for index, layer in enumerate(target.get_decoder().layers[:2]):
        layer.register_forward_hook(
            # Of the prompt, the first forward.
            lambda module, args, output, index=index: outputs.update({index: outputs.get(index, output)})
        )
    drafter, contexts = build_drafter(), []
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: contexts.append(kwargs["context_hidden_states"]), with_kwargs=True
    )
    target.generate(ids, assistant_model=drafter, **given)
    assert torch.equal(contexts[0], torch.cat([outputs[0], outputs[1]], dim=-1))
    assert contexts[0].shape == (1, ids.shape[1], 64)


@pytest.mark.parametrize("loop", ["own", "stock"])
def test_a_text_goes_on_behind_an_image_of_an_earlier_call(loop):
    """A second call with other image and length: positions of the first one, which the model keeps, play no part."""
    target, drafter = build("qwen2_5_vl"), build_drafter()
    drafter.speculation.loop = loop
    for length, with_images, seed in ((9, True, 0), (5, True, 1), (7, False, 0), (12, True, 2)):
        ids, given, _ = inputs("qwen2_5_vl", (length,), with_images, seed)
        out = target.generate(ids, assistant_model=drafter, **given)
        assert torch.equal(out, target.generate(ids, **given))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava"])
def test_a_conversation_goes_on_from_the_cache_of_an_image(family):
    """The image is in the cache that is handed in, and its pixels are not given again."""
    target = build(family)
    ids, given, _ = inputs(family, (9,), True)
    length, texts = ids.shape[1], []
    for drafter in (None, build_drafter()):
        first = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **given)
        more = torch.cat([first.sequences, prompt(5, 9, vocab=50) + 2], dim=1)
        cache = first["past_key_values"] if "past_key_values" in first else first["cache"]
        options = {"past_key_values": cache, "max_new_tokens": NEW, "do_sample": False}
        texts.append(target.generate(more, assistant_model=drafter, **options))
    assert torch.equal(*texts)
    assert texts[0].shape[1] == length + NEW + 5 + NEW


def test_sampling_from_one_candidate_behind_an_image():
    target = build("gemma3")
    ids, given, prompts = inputs("gemma3", (9, 4), True)
    expected = target.generate(ids, **given)
    out = target.generate(
        ids, assistant_model=oracle(target, prompts, expected), **{**given, "do_sample": True, "top_k": 1}
    )
    assert torch.equal(out, expected)


def test_a_prompt_with_an_image_is_not_cut_into_pieces():
    target = build("llava")
    ids, given, _ = inputs("llava", (9,), True)
    with pytest.raises(ValueError, match=r"`prefill_chunk_size`: `(pixel_values|mm_encoder_outputs)`"):
        target.generate(ids, assistant_model=build_drafter(), prefill_chunk_size=4, **given)


def test_an_image_in_layers_of_its_own_is_refused_before_any_forward():
    target, forwards = build("mllama"), []
    target.register_forward_pre_hook(lambda module, args: forwards.append(module))
    with pytest.raises(ValueError, match="MllamaForConditionalGeneration attends to images in layers of their own"):
        target.generate(prompt(), assistant_model=build_drafter(), max_new_tokens=4)
    assert not forwards
