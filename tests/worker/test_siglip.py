"""Does our SigLIP compute what transformers' computes, alone, packed with other images, and beside padding?"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import SiglipVisionConfig, SiglipVisionModel

from ipc.errors import ConfigError, RequestError
from worker.config_fields import Fields, read_json
from worker.encoder_graphs import EncoderCudaGraphManager
from worker.encoders.siglip import MAX_MAGNITUDE, SiglipEncoder
from worker.encoders.siglip_config import read_siglip
from worker.models import load_weights
from worker.weights.safetensors_checkpoint import SafetensorsCheckpoint

CPU = torch.device("cpu")
TOLERANCE = 2e-4
STD = 0.2
PATCH, GRID = 4, 5
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "image_size": GRID * PATCH,
    "patch_size": PATCH,
}
SHAPES = [(5, 5), (3, 4), (1, 1), (7, 2), (6, 6), (2, 9), (5, 5)]
"""Rows and columns of patches: the trained grid, smaller and larger ones, one patch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a pooling head, as transformers writes it."""
    torch.manual_seed(0)
    model = SiglipVisionModel(SiglipVisionConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Ones and zeros of norms would hide that they are not used.
            parameter.normal_(1.0 if "layer_norm" in name and name.endswith("weight") else 0.0, STD)
    folder = tmp_path_factory.mktemp("siglip")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> SiglipVisionModel:
    return SiglipVisionModel.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def encoder(folder: Path) -> SiglipEncoder:
    return load(folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> SiglipEncoder:
    encoder = SiglipEncoder(read_siglip(read_json(folder / "config.json")), dtype=dtype, device=CPU)
    load_weights(encoder, SafetensorsCheckpoint(folder), lambda done, total: None)
    return encoder


def draw_images(shapes: list[tuple[int, int]] = SHAPES) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.rand(3, PATCH * rows, PATCH * columns, generator=draw) * 2 - 1 for rows, columns in shapes]


@torch.no_grad()
def expected_tokens(oracle: SiglipVisionModel, image: Tensor) -> Tensor:
    return oracle(image[None], interpolate_pos_encoding=True).last_hidden_state[0]


def make_manager(encoder: SiglipEncoder, *, smallest: int = 8, largest: int = 64) -> EncoderCudaGraphManager:
    manager = EncoderCudaGraphManager(encoder, smallest=smallest, largest=largest)
    manager.capture(lambda done, total: None)
    return manager


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    gap = (actual - expected).abs().max().item()
    assert gap <= TOLERANCE, f"tokens differ by {gap}"


@pytest.mark.parametrize("image", draw_images(), ids=[f"{rows}x{columns}" for rows, columns in SHAPES])
def test_alone_it_equals_the_oracle(encoder: SiglipEncoder, oracle: SiglipVisionModel, image: Tensor) -> None:
    eager = EncoderCudaGraphManager(encoder, smallest=8, largest=8)
    assert_close(eager.encode([encoder.item(image)])[0], expected_tokens(oracle, image))


@pytest.mark.parametrize("largest", [32, 64, 128])
def test_packed_and_padded_it_equals_the_oracle(
    encoder: SiglipEncoder, oracle: SiglipVisionModel, largest: int
) -> None:
    """With 128 all are one pack; with 32 there are several, and the image of 36 patches is oversized."""
    images = draw_images()
    manager = make_manager(encoder, largest=largest)
    for _ in range(2):  # the second time over what the first has left in the buffers
        outputs = manager.encode([encoder.item(image) for image in images])
        for image, output in zip(images, outputs, strict=True):
            assert_close(output, expected_tokens(oracle, image))
    statistics = manager.statistics
    assert statistics.num_items_eager == (2 if largest == 32 else 0)
    assert statistics.num_items_replayed + statistics.num_items_eager == 2 * len(images)
    assert statistics.num_tokens_padded > 0


def test_neighbours_of_large_magnitude_change_nothing(encoder: SiglipEncoder) -> None:
    manager = make_manager(encoder)
    image, loud = draw_images([(4, 4), (4, 4)])
    alone = manager.encode([encoder.item(image)])[0]
    loud = loud * MAX_MAGNITUDE
    beside = manager.encode([encoder.item(loud), encoder.item(image), encoder.item(loud)])[1]
    assert (alone - beside).abs().max() < 2e-5


def test_bfloat16_is_as_good_as_the_oracles(folder: Path, oracle: SiglipVisionModel) -> None:
    theirs = SiglipVisionModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    images = draw_images([(5, 5)] * 6)
    exact = torch.cat([expected_tokens(oracle, image) for image in images])
    encoder = load(folder, torch.bfloat16)
    ours = torch.cat(make_manager(encoder).encode([encoder.item(image) for image in images])).float()
    their_error = (torch.cat([expected_tokens(theirs, image).float() for image in images]) - exact).square().mean()
    assert 0 < (ours - exact).square().mean() <= 1.1 * their_error


# ---------------------------------------------------------------------------------------------- weights


def test_weights_are_those_of_the_oracle_without_its_head(encoder: SiglipEncoder, oracle: SiglipVisionModel) -> None:
    own = {name for name in oracle.state_dict() if not name.startswith("head.")}
    assert set(encoder.weight_slots()) == own
    assert encoder.weight_bytes() == sum(4 * oracle.state_dict()[name].numel() for name in own)


def test_names_of_older_checkpoints_beside_a_text_encoder(folder: Path, tmp_path: Path, encoder: SiglipEncoder) -> None:
    tensors = {f"vision_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {
        "text_model.encoder.layers.0.mlp.fc1.weight": torch.zeros(2, 2), "logit_scale": torch.zeros(1),
        "vision_model.embeddings.position_ids": torch.zeros(1, 25),
    }  # fmt: skip
    rewrite(folder, tmp_path, tensors)
    image = encoder.item(draw_images()[1])
    assert torch.equal(run_alone(load(tmp_path), image), run_alone(encoder, image))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"encoder.layers.2.mlp.fc1.bias": None}, "lacks tensor encoder.layers.2.mlp.fc1.bias"),
        ({"encoder.layers.3.mlp.fc1.bias": torch.zeros(80)}, "holds tensor encoder.layers.3.mlp.fc1.bias"),
        (
            {"embeddings.patch_embedding.weight": torch.zeros(48, 48)},
            "patch_embedding.weight in .* has shape .48, 48., the configuration asks for .48, 3, 4, 4.",
        ),
    ],
)
def test_weights_of_another_model_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Tensor | None], text: str
) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    rewrite(folder, tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ConfigError, match=text):
        load(tmp_path)


def rewrite(folder: Path, target: Path, tensors: dict[str, Tensor]) -> None:
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, target / "model.safetensors")


def run_alone(encoder: SiglipEncoder, item: Any) -> Tensor:
    return EncoderCudaGraphManager(encoder, smallest=1, largest=1).encode([item])[0]


# ---------------------------------------------------------------------------------------------- descriptions


def test_defaults_are_those_of_the_oracle() -> None:
    theirs = SiglipVisionConfig()
    ours = read_siglip(Fields({}, "config.json: vision_config"))
    for name in ("hidden_size", "intermediate_size", "num_channels", "image_size", "patch_size", "layer_norm_eps"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert (ours.num_layers, ours.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert ours.grid_size == 14


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 0}, "num_layers=0 must be at least 1"),
        ({"num_attention_heads": 5}, "num_heads=5 must divide hidden_size=48"),
        ({"patch_size": 21}, "patch_size=21 must be at most image_size=20"),
        ({"image_size": [20, 20]}, r"image_size=\[20, 20\] must be of type int"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0 must be above 0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'gelu_pytorch_tanh'"),
    ],
)
def test_descriptions_that_do_not_work_are_refused(folder: Path, changes: dict[str, Any], text: str) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    with pytest.raises(ConfigError, match=f"config.json: {text}"):
        read_siglip(Fields(values, "config.json"))


@pytest.mark.parametrize(
    ("pixels", "text"),
    [
        (torch.zeros(20, 20), "have shape [20, 20], must be [3, height, width]"),
        (torch.zeros(4, 20, 20), "have shape [4, 20, 20], must be [3, height, width]"),
        (torch.zeros(3, 20, 18), "height and width must be multiples of 4 above 0"),
        (torch.zeros(3, 0, 20), "height and width must be multiples of 4 above 0"),
        (torch.zeros(3, 20, 20, dtype=torch.uint8), "are of type torch.uint8, must be normalised floats"),
        (torch.full((3, 8, 8), torch.nan), "reach nan, must be finite and within 16 of 0"),
        (torch.full((3, 8, 8), -torch.inf), "reach inf, must be finite"),
        (torch.full((3, 8, 8), 255.0), "reach 255, must be finite and within 16 of 0"),
    ],
)
def test_bad_pixels_are_named(encoder: SiglipEncoder, pixels: Tensor, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        encoder.item(pixels)
    assert caught.value.field == "pixels"
    assert text in caught.value.reason
