"""Exemplars that are stored as JPEG or WebP: more of them fit in a budget.

    images of a class, the best first -> encode_first -> bytes of each, as many as its share of the budget may hold
    bytes of all classes -> fits_in_share -> the first of each class that do fit
    bytes of all classes -> EncodedImages (coding/image_codec.py) -> stored -> decoded -> pixels

Pixels are the decoded images: training and the nearest-mean classifier see what compression has lost. Herding chooses
by the features of the original images, which the task still has. What is stored is the bytes of the images behind the
prefix that all share, this prefix, the length of each image, and the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch
from torch import Tensor

from krnet.coding.image_codec import EncodedImages, ImageEncoding, common_prefix, encode_images
from krnet.errors import SettingError
from krnet.learners.exemplars import Exemplars, class_starts

LABEL_BYTES = 4
ENCODED_AT_ONCE = 64  # images of a class; fewer are encoded in vain, more keep more processors busy
STORED_PARTS = {"exemplars": "stream", "exemplar_lengths": "lengths", "exemplar_prefix": "start"}


def image_bytes(contents: Sequence[bytes]) -> list[int]:
    """Bytes that each image takes beside the prefix that all share: the rest of it, its length and its label."""
    prefix_bytes = len(common_prefix(contents))
    own_bytes = [len(content) - prefix_bytes for content in contents]
    length_bytes = 2 if max(own_bytes, default=0) < 2**16 else 4
    return [size + length_bytes + LABEL_BYTES for size in own_bytes]


def encode_first(pixels: Tensor, rows: Tensor, share: int, encoding: ImageEncoding) -> list[bytes]:
    """Encode images of a class in the order of `rows` until they take more than a share of the budget, in bytes.

    Other classes may shorten the prefix that all images share, so fewer may fit in the end, but never more.
    """
    found = list[bytes]()
    for part in rows.split(ENCODED_AT_ONCE):
        found += encode_images(pixels[part], encoding)
        if sum(image_bytes(found)) > share:
            break
    return found


def fits_in_share(contents: Sequence[bytes], labels: Tensor, budget: int, num_shares: int) -> Tensor:
    """(M,) bool: the first images of each class that fit in its share, 1 / num_shares, of a budget in bytes."""
    sizes, prefix_bytes = torch.tensor(image_bytes(contents)), len(common_prefix(contents))
    starts = class_starts(labels)
    before = sizes.cumsum(0) - sizes  # (M,): bytes of all images before each
    fits = before + sizes - before[starts] <= (budget - prefix_bytes) // num_shares
    if not fits[starts].all():
        raise too_small(budget, prefix_bytes + num_shares * int(sizes[starts].max()), num_shares)
    return fits


def too_small(budget: int, needed: int, num_classes: int) -> SettingError:
    return SettingError(
        f"budget is {budget}; expected at least {needed}, for one exemplar of each of {num_classes} classes. Give a "
        f"larger budget, or a lower exemplar_quality"
    )


@dataclass(frozen=True, eq=False)
class CompressedExemplars(Exemplars):
    contents: tuple[bytes, ...]
    """(M,): the bytes of each image."""
    encoding: ImageEncoding

    @classmethod
    def empty(cls, image_shape: tuple[int, ...], device: torch.device, encoding: ImageEncoding) -> CompressedExemplars:
        none = Exemplars.none(image_shape, device)
        return cls(none.pixels, none.labels, (), encoding)

    @property
    def _shape(self) -> tuple[int, int, int]:
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def select(self, mask: Tensor) -> CompressedExemplars:
        mask = mask.to(self.labels.device)
        contents = tuple(compress(self.contents, mask.tolist()))
        return replace(self, pixels=self.pixels[mask], labels=self.labels[mask], contents=contents)

    def append(self, pixels: Tensor, labels: Tensor) -> CompressedExemplars:
        return self._append_encoded(encode_images(pixels, self.encoding), labels)

    def _append_encoded(self, contents: Sequence[bytes], labels: Tensor) -> CompressedExemplars:
        encoded = EncodedImages.of(contents, self.encoding, self._shape)
        decoded = encoded.images(torch.arange(len(contents)))
        pixels = torch.cat([self.pixels, decoded.to(self.pixels.device)])
        labels = torch.cat([self.labels, labels.to(self.labels)])
        return replace(self, pixels=pixels, labels=labels, contents=(*self.contents, *contents))

    def append_within(
        self, budget: int, num_shares: int, pixels: Tensor, rows: Tensor, labels: Tensor
    ) -> CompressedExemplars:
        """Add images of new classes, and keep of each class, old or new, the first that fit in its share of the budget.

        num_shares  equal shares of the budget: one for each class that there is, or that there will be
        rows        (N,): the images in `pixels` in the order of `herd_classes`
        labels      (N,): the label of each row
        """
        classes, counts = labels.cpu().unique_consecutive(return_counts=True)
        share = budget // num_shares
        encoded = [encode_first(pixels, own, share, self.encoding) for own in rows.split(counts.tolist())]
        new = [content for contents in encoded for content in contents]
        new_labels = classes.repeat_interleave(torch.tensor([len(contents) for contents in encoded]))
        all_labels = torch.cat([self.labels.cpu(), new_labels.to(self.labels.dtype)])
        fits = fits_in_share([*self.contents, *new], all_labels, budget, num_shares)
        fits_new = fits[len(self) :]
        kept = self.select(fits[: len(self)])
        return kept._append_encoded(list(compress(new, fits_new.tolist())), new_labels[fits_new])

    def tensors(self) -> dict[str, Tensor]:
        encoded = EncodedImages.of(self.contents, self.encoding, self._shape).tensors()
        return {name: encoded[part] for name, part in STORED_PARTS.items()} | {"exemplar_labels": self.labels}

    def load(self, tensors: Mapping[str, Tensor]) -> CompressedExemplars:
        parts = {part: tensors[name] for name, part in STORED_PARTS.items()}
        encoded = EncodedImages.from_tensors(parts, self.encoding, self._shape)
        none = CompressedExemplars.empty(self._shape, self.pixels.device, self.encoding)
        return none._append_encoded([encoded.content(i) for i in range(len(encoded))], tensors["exemplar_labels"])
