"""The trunk of recorded images is known by what it computes, not by its weights alone; its kind does not matter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import krnet
from forge import rewrite_metadata
from krnet.errors import InputError, NotARecordingError
from krnet.nn.fingerprint import behaviour

sys.path.append(str(Path(__file__).parents[1] / "golden"))
from small import IMAGES, make_trunk, pictures

GOLDEN = Path(__file__).parents[1] / "golden" / "images-jpeg.krn"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, images, trunk = tmp_path_factory.mktemp("trunks") / "x.krn", pictures(30), make_trunk()
    mean, std = (torch.tensor(IMAGES[name])[:, None, None] for name in ("mean", "std"))
    with torch.no_grad():
        features = trunk((images.float() / 255 - mean) / std)
    krnet.record(features, images=images, trunk=trunk, out=path, quality=95, **IMAGES)
    return path


def with_activation(activation: nn.Module) -> nn.Module:
    trunk = make_trunk()
    trunk[1] = activation
    return trunk


@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.GELU(), nn.LeakyReLU(0.01), nn.Identity()], ids=str)
def test_a_trunk_of_the_same_weights_that_computes_something_else_is_refused(recorded, activation):
    with pytest.raises(InputError, match="computes something else"):
        krnet.open(recorded, trunk=with_activation(activation))[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ["new", "old"])
def test_the_same_trunk_in_another_form_gives_the_same_features(recorded, path):
    """An old file holds the hash of the weights alone."""
    path, trunk = recorded if path == "new" else GOLDEN, make_trunk()
    expected = krnet.open(path, trunk=trunk)[:5]
    example = torch.rand(2, 3, 12, 12)
    exported = torch.export.export(trunk, (example,), dynamic_shapes=({0: torch.export.Dim("n")},)).module()
    for other in (torch.jit.script(trunk), torch.jit.trace(trunk, example), exported):
        recording = krnet.open(path, trunk=other)
        assert torch.allclose(recording[0], expected[0], atol=1e-5)
        assert torch.allclose(recording[:5], expected, atol=1e-5)


@pytest.mark.parametrize("results", [3, "x", [1.0], [[]] * 12])
def test_forged_results_are_refused(recorded, tmp_path, results):
    path = tmp_path / "x.krn"
    path.write_bytes(recorded.read_bytes())
    rewrite_metadata(path, lambda metadata: metadata["settings"].update(trunk_results=results))
    with pytest.raises(NotARecordingError, match="trunk_results"):
        krnet.open(path, trunk=make_trunk())[0]


def test_results_do_not_depend_on_the_batch_and_hardly_on_rounding():
    trunk = make_trunk()
    run = lambda images: trunk(images.float() / 255)  # noqa: E731
    by_one = lambda images: torch.cat([run(image[None]) for image in images])  # noqa: E731
    in_double = lambda images: make_trunk().double()(images.double() / 255)  # noqa: E731
    expected = behaviour(run, (3, 12, 12))
    for other in (by_one, in_double):
        assert behaviour(other, (3, 12, 12)) == pytest.approx(expected, rel=1e-4, abs=1e-4)
