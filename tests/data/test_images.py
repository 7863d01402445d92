"""Images: one normal form, references by hash, spans among tokens, and the store that holds each once."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import json
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps
from transformers.utils import is_torchvision_available

from fusionrl.data import images, processor
from fusionrl.data.image_store import ImageStore
from fusionrl.data.images import (
    ImageLimits,
    ImageRef,
    ProcessorFiles,
    collapsed,
    expanded,
    normal_form,
    read_processor_files,
)
from fusionrl.data.sample import Sample
from tests.tiny_vision import image_numbers

LIMITS = ImageLimits(14, 2, 28 * 28, 64 * 28 * 28)
REF = ImageRef("a", 28, 56, 2)
PAD = 9


def picture(seed: int, height: int = 100, width: int = 230) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(seed: int, height: int = 100, width: int = 230, **options: Any) -> bytes:
    content = io.BytesIO()
    picture(seed, height, width).save(content, "PNG", **options)
    return content.getvalue()


# ------------------------------------------------------------------------------------------------ the normal form
TORCHVISION = [pytest.mark.gpu, pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")]


@pytest.mark.parametrize("backend", ["pil", pytest.param("torchvision", marks=TORCHVISION)])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_tokens_and_pixels_are_those_of_transformers(kind: str, backend: str, tmp_path: Path) -> None:
    """Acceptance point A2: random sizes, within the limits and beyond. torchvision resizes in its own way."""
    from transformers import AutoImageProcessor

    numbers = image_numbers(kind)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(numbers))
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 7, "video_token_id": 8}))
    files, reference = read_processor_files(tmp_path), AutoImageProcessor.from_pretrained(tmp_path, backend=backend)
    assert type(reference).__name__.endswith("Pil") == (backend == "pil")
    settings = (files.limits, files.mean, files.std)
    for height, width in ((5, 5), (28, 28), (100, 230), (640, 480), (33, 1000), (900, 41), (13, 2600)):
        original = picture(height, height, width)
        pixels = normal_form(original, files.limits)
        wanted = reference(images=original, return_tensors="np")
        again = reference(images=Image.fromarray(pixels), return_tensors="np")
        if (height, width) != (13, 2600):  # which transformers leaves over the limit: a second resize would change it
            assert wanted["image_grid_thw"].tolist() == again["image_grid_thw"].tolist()
            assert backend != "pil" or np.abs(wanted["pixel_values"] - again["pixel_values"]).max() <= 1e-6
        own = images.patches(pixels, *settings)
        assert np.abs(own - again["pixel_values"]).max() <= 1e-6
        grid = again["image_grid_thw"][0].tolist()
        assert files.limits.num_tokens(*pixels.shape[:2]) == np.prod(grid) // 4
        assert files.limits.fit(*pixels.shape[:2]) == pixels.shape[:2]
    assert (files.placeholder, files.media_tokens) == (7, (7, 8))


def test_kimi_vl_fills_images_up(tmp_path: Path) -> None:
    """As its processor does where that keeps to its limit; and the result is one that it leaves as it is."""

    def processed(height: int, width: int, limit: int) -> tuple[int, int]:
        """(height, width) by the rule of the checkpoint's processor."""
        if (patches := (height // 14) * (width // 14)) > limit:
            height, width = (int(side * (limit / patches) ** 0.5) for side in (height, width))
        return -(-height // 28) * 28, -(-width // 28) * 28

    numbers = image_numbers("kimi_vl") | {"in_token_limit": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(numbers))
    (tmp_path / "config.json").write_text('{"media_placeholder_token_id": 7}')
    with pytest.raises(ValueError, match="in_token_limit 3 is below the 4 patches of one token"):
        read_processor_files(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(numbers | {"in_token_limit": 4096}))
    files, random = read_processor_files(tmp_path), np.random.default_rng(2)
    assert (files.placeholder, files.media_tokens, files.start) == (7, (7,), None)
    assert files.limits == ImageLimits(14, 2, 1, 4096 * 14**2, pads=True)
    sizes = (10 ** random.uniform(0, 4, (500, 2))).astype(int).tolist()
    for height, width in sizes:
        size = files.limits.fit(height, width)
        assert processed(*size, 4096) == files.limits.fit(*size) == size
        assert size[0] * size[1] <= files.limits.max_pixels and max(size) // 14 < 512
        theirs = processed(height, width, 4096)
        is_kept = processed(*theirs, 4096) == theirs and max(theirs) // 14 < 512
        if is_kept and (height // 14) * (width // 14) <= 4096:
            assert size == theirs and images.content_size(height, width, size) == (height, width)
    original = picture(3, 30, 50)
    pixels = normal_form(original, files.limits)
    assert pixels.shape == (56, 56, 3) and not pixels[30:].any() and not pixels[:, 50:].any()
    assert np.array_equal(pixels[:30, :50], np.asarray(original))
    assert normal_form(picture(4, 2000, 1000), files.limits).shape == (1232, 616, 3)
    with pytest.raises(ValueError, match="--image-min-pixels 900: this model's images are not enlarged"):
        files.limited(900, None)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(numbers | {"pad_input": False}))
    read_processor_files.cache_clear()
    with pytest.raises(ValueError, match="pad_input is not true: images that are cut at their sides"):
        read_processor_files(tmp_path)


def test_files_of_many_kinds_have_one_form() -> None:
    original = picture(1)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    original.save(turned, "PNG", exif=exif)
    assert images.image_size(turned.getvalue()) == (230, 100)
    upright = ImageOps.exif_transpose(Image.open(turned))
    assert np.array_equal(np.asarray(images.decoded(turned.getvalue())), np.asarray(upright))
    tiff = io.BytesIO()
    original.save(tiff, "TIFF", exif=exif)
    assert images.image_size(tiff.getvalue()) == (230, 100)
    assert np.array_equal(np.asarray(images.decoded(tiff.getvalue())), np.asarray(upright))
    grey = io.BytesIO()
    Image.fromarray(np.array([[0, 256], [32768, 65535]], np.uint16)).save(grey, "PNG")
    assert np.asarray(images.decoded(grey.getvalue()))[..., 0].tolist() == [[0, 1], [128, 255]]
    words = Image.fromarray(np.array([[0, 3], [200, 255]], np.int32))
    assert np.asarray(images.as_rgb(words))[..., 0].tolist() == [[0, 3], [200, 255]]
    ink = original.convert("CMYK")
    assert np.array_equal(np.asarray(images.picture(images.png_of(ink))), np.asarray(ink.convert("RGB")))
    frames = io.BytesIO()
    original.save(frames, "GIF", save_all=True, append_images=[picture(2)])
    assert images.decoded(frames.getvalue()).size == (230, 100)


def test_a_size_is_known_by_the_header_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    content = png(1)
    for broken in (content[: len(content) * 2 // 3], content[:60]):  # behind its header, and a whole chunk is gone
        assert images.image_size(broken) == (100, 230)
        with pytest.raises(ValueError, match="the image cannot be decoded"):
            images.decoded(broken)
    with pytest.raises(ValueError, match="the image cannot be opened|not an image file"):
        images.image_size(content[:20])
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("it was decoded"))
    assert images.image_size(content) == (100, 230)


def test_limits_of_files_and_flags(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"image_token_id": 3}')
    nested = {"image_processor": {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    files = read_processor_files(tmp_path)
    assert files.limits == ImageLimits(16, 2, 4096, 65536)
    assert files.limited(None, 16384).limits.fit(600, 600) == (128, 128)
    with pytest.raises(ValueError, match="--image-max-pixels 900: a token of this model's images has 32 x 32"):
        files.limited(None, 900)
    with pytest.raises(ValueError, match="--image-min-pixels 70000 is over --image-max-pixels 65536 .*the maximum is"):
        files.limited(70000, None)
    with pytest.raises(ValueError, match="over 200 times"):
        files.limits.fit(1, 300)


# ------------------------------------------------------------------------------------------------ among tokens
def test_only_recorded_spans_are_collapsed() -> None:
    whole = expanded([1, PAD, 2], [REF], PAD)
    assert whole.ids.tolist() == [1, PAD, PAD, 2] and whole.spans == [(1, REF)]
    sampled = [*whole.ids.tolist(), PAD, 5]  # a model may sample a placeholder
    assert collapsed(sampled, whole.spans).tolist() == [1, PAD, 2, PAD, 5]
    later = expanded([PAD, 3], [REF], PAD, start=6)
    assert collapsed([*sampled, *later.ids], [*whole.spans, *later.spans]).tolist() == [1, PAD, 2, PAD, 5, PAD, 3]
    with pytest.raises(ValueError, match="2 placeholders of images in the tokens, but 1 images"):
        expanded([PAD, PAD], [REF], PAD)


@pytest.mark.parametrize(
    ("spans", "changes", "problem"),
    [
        ([(1, REF), (2, REF)], {}, "begins within the one before it"),
        ([(1, REF), (8, REF)], {}, "has 2 tokens, but only 1 follow"),
        ([(1, REF), (4, REF)], {"response_length": 4}, "lies across the end of the prompt, 5"),
        ([(0, REF)], {}, "are not all its placeholder"),
        ([(1, REF), (6, REF)], {"response_length": 4, "loss_mask": [1, 1, 0, 0]}, "its loss_mask is not 0"),
    ],
)
def test_a_sample_whose_spans_do_not_fit(spans: Any, changes: dict[str, Any], problem: str) -> None:
    sample = Sample(index=3, tokens=[1, PAD, PAD, 2, PAD, PAD, PAD, PAD, 5], image_spans=spans, **changes)
    with pytest.raises(ValueError, match=f"sample 3: .*{problem}"):
        sample.validate()


# ------------------------------------------------------------------------------------------------ the store
def test_the_store_holds_an_image_once_and_within_its_limit(tmp_path: Path) -> None:
    store = ImageStore(500_000, tmp_path)
    first = store.add_file(png(0), LIMITS)
    assert store.add_file(png(0), LIMITS) is first and pickle.loads(pickle.dumps(first)) is first
    assert copy.deepcopy([first])[0] is first
    pixels = store.pixels(first)
    assert np.array_equal(pixels, normal_form(png(0), LIMITS)) and store.pixels(first) is pixels
    others = [store.add_file(png(seed), LIMITS) for seed in range(1, 12)]
    for image in others:
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(store.png(image)))), store.pixels(image))
        assert store.num_bytes <= 500_000
    assert store.pixels(first) is not pixels and np.array_equal(store.pixels(first), pixels)  # made anew
    assert np.array_equal(np.asarray(store.original(first)), np.asarray(picture(0)))


def test_an_image_goes_with_its_last_reference(tmp_path: Path) -> None:
    store = ImageStore(folder=tmp_path)
    for _ in range(20):  # rollouts
        crops = [store.add_picture(picture(seed, 300, 300), LIMITS) for seed in range(3)]
        sizes = store.num_bytes, store._scratch and store._scratch.num_bytes
        assert sizes[0] == 3 * crops[0].height * crops[0].width * 3
        assert sizes[1] is not None and sizes[1] < 3 * 300 * 300 * 3 * 1.02
        del crops
    store.pixels(store.add_file(png(9), LIMITS))
    assert len(store._cache) == 1 and not list(tmp_path.iterdir())  # the scratch file has no name


def test_originals_of_files_and_of_checkpoints(tmp_path: Path) -> None:
    path, store = tmp_path / "a.png", ImageStore()
    path.write_bytes(png(4))
    image = store.add_file(path.read_bytes(), LIMITS, str(path))
    pixels = store.pixels(image)
    store.save([image, image], tmp_path / "saved")
    path.write_bytes(png(5))
    with pytest.raises(ValueError, match=r"a\.png has changed since the run began with it"):
        ImageStore().pixels(image)
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read any more"):
        ImageStore().pixels(image)
    elsewhere = ImageStore()
    elsewhere.load([image, REF], tmp_path / "saved")
    (saved,) = (tmp_path / "saved").iterdir()
    written = saved.stat()
    store.save([image], tmp_path / "saved")  # again
    assert saved.stat() == written
    saved.unlink()  # an old checkpoint that is not kept
    assert np.array_equal(elsewhere.pixels(image), pixels)
    with pytest.raises(ValueError, match="are not in this process"):
        elsewhere.pixels(REF)


def test_references_of_pickles_are_watched(tmp_path: Path) -> None:
    """What a checkpoint or another process names, and this one decoded, goes with its reference, too."""
    path, store = tmp_path / "a.png", ImageStore()
    path.write_bytes(png(4))
    image = store.add_file(path.read_bytes(), LIMITS, str(path))
    packed, other = pickle.dumps(image), ImageStore()
    del image, store
    gc.collect()
    image = pickle.loads(packed)
    other.png(image)
    assert len(other._cache) == 2
    del image
    gc.collect()
    other._sweep()
    assert other.num_bytes == 0 and not other._cache


def test_an_image_that_cannot_be_decoded_has_a_name(tmp_path: Path) -> None:
    path, store = tmp_path / "a.png", ImageStore()
    path.write_bytes(png(4)[:9000])
    image = store.add_file(path.read_bytes(), LIMITS, str(path))
    with pytest.raises(ValueError, match=r"a\.png: the image cannot be decoded"):
        store.pixels(image)
    image = store.add_file(png(5)[:9000], LIMITS)
    with pytest.raises(ValueError, match=f"image {image.key}: the image cannot be decoded"):
        store.pixels(image)
    with pytest.raises(ValueError, match="the image cannot be decoded"):
        store.add_picture(Image.open(io.BytesIO(png(6)[:9000])), LIMITS)


def test_threads_name_an_image_by_one_reference() -> None:
    """A reference that another thread takes for the last one would be dropped with the image."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            for number in range(300):
                key, barrier = f"{number}", threading.Barrier(8)

                def name(key: str = key, barrier: threading.Barrier = barrier) -> ImageRef:
                    barrier.wait()
                    return images.interned(key, 28, 28, 1)

                refs = list(threads.map(lambda _, name=name: name(), range(8)))
                assert len({id(ref) for ref in refs}) == 1
    finally:
        sys.setswitchinterval(interval)


def test_another_process_reads_what_this_one_has(tmp_path: Path) -> None:
    store, other = ImageStore(folder=tmp_path), ImageStore()
    files = ProcessorFiles(LIMITS, (0.5,) * 3, (0.5,) * 3, PAD, (PAD,))
    image = store.add_file(png(0), LIMITS)
    assert store.lend([image]) is None  # of a run of text
    store.configure(1 << 20, tmp_path, files)
    loan = store.lend([image, REF])
    other.borrow(pickle.loads(pickle.dumps(loan)))
    assert other.processor == files and np.array_equal(other.pixels(image), store.pixels(image))
    assert loan is not None
    (lent, extent, checksum), late = loan.extents[0], ImageStore()
    late.borrow(dataclasses.replace(loan, extents=((lent, extent, checksum + 1),)))  # the space has another image now
    with pytest.raises(ValueError, match="are gone: the process that had them needs them no more"):
        late.pixels(image)
    del image, loan, lent
    gc.collect()
    other._sweep()
    assert not other._borrowed


# ------------------------------------------------------------------------------------------------ images of PIL
def test_images_of_hooks_share_their_pixels_until_they_change_them(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ImageStore()
    monkeypatch.setattr(processor, "IMAGES", store)
    ref = store.add_picture(picture(3), LIMITS)
    first, second = processor.StoredImage(ref), processor.StoredImage(ref)
    assert np.array_equal(np.asarray(first), store.pixels(ref)) and first.im is not None
    second.load()
    assert first.im is second.im
    second.putpixel((0, 0), (1, 2, 3))
    first = processor.StoredImage(ref)  # whose pixels were not read yet
    ImageDraw.Draw(first).rectangle((2, 2, 9, 9), fill=(9, 9, 9))
    assert processor.ref_of(first) is processor.ref_of(second) is None
    assert np.array_equal(np.asarray(processor.StoredImage(ref)), store.pixels(ref))
    for copied in (copy.copy(second), copy.deepcopy([second])[0], pickle.loads(pickle.dumps(second))):
        assert copied.getpixel((0, 0)) == (1, 2, 3) and processor.ref_of(copied) is None
    third = copy.deepcopy(processor.StoredImage(ref))
    assert processor.ref_of(third) is processor.ref_of(pickle.loads(pickle.dumps(third))) is ref
