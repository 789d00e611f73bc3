"""`kvoracle capacity`: its figures by hand, its chart read back, and its refusals.

The arithmetic, GLM-5.3-Flash: 11 DSA layers, logical page 256 tokens, 33 index bytes a token.

    bf16:    11 * (1024 + 33 r) * 256 bytes a device page,  11 * 1024 * 256 a host page
    raw FP8: 11 * ( 512 + 33 r) * 256,                      11 *  512 * 256
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import capacity
from oracle_tests.test_cli import Run, sentence

SVG = "{http://www.w3.org/2000/svg}"

# 13,793 unpooled pages of 64 tokens are #42178's published baseline, 3,531,072 tokens * 12,716
BF16_BUDGET = 44_901_111_552
# the least that holds HiSparse's published baseline: 18,389 pages * 1,534,720 bytes
FP8_BUDGET = 28_221_966_080


@pytest.fixture
def kvoracle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(capsys, monkeypatch)


def fitted(kvoracle: Run, folder: Path, *options: str | int) -> dict[int | None, dict]:
    """The rows of the result by ratio, `None` without HiSparse."""
    result = folder / "capacity.json"
    status, _, err = kvoracle("capacity", *map(str, options), "--json", result)
    assert status == 0, err
    return {row["ratio"]: row for row in json.loads(result.read_bytes())["rows"]}


def test_the_published_figures(kvoracle: Run, tmp_path: Path) -> None:
    host = ("--host-budget", "1TB")
    pooled = fitted(kvoracle, tmp_path, "--device-budget", BF16_BUDGET, *host)
    assert pooled[None]["logical_tokens"] == 3_861_760
    fp8 = ("--row-format", "fp8_raw", "--device-budget")
    hisparse = fitted(kvoracle, tmp_path, *fp8, FP8_BUDGET, *host)
    assert hisparse[None]["logical_tokens"] == 4_707_584
    # 28,221,966,080 / (11 * 578 * 256) = 17,339.1 pages, twice 256 tokens each
    assert hisparse[2]["logical_tokens"] == 8_877_568
    less = fitted(kvoracle, tmp_path, *fp8, FP8_BUDGET - 1, *host)
    assert less[None]["logical_tokens"] == 4_707_584 - 256


def test_the_host_budget_binds_where_it_is_short(kvoracle: Run, tmp_path: Path) -> None:
    """1,000 device pages without HiSparse; the host holds 1,500 pages, and 1 byte less than
    1,501."""
    budgets = ("--device-budget", 1000 * 2_976_512, "--host-budget", 1501 * 2_883_584 - 1)
    rows = fitted(kvoracle, tmp_path, *budgets)
    # floor(1000 * 1057 / (1024 + 33 r)) device pages
    device_pages = {None: 1000, 1: 1000, 2: 969, 4: 914, 8: 820}
    host_pages = {None: 0, 1: 1000, 2: 1938, 4: 3656, 8: 6560}
    held_pages = {None: 1000, 1: 1000, 2: 1500, 4: 1500, 8: 1500}
    for ratio, row in rows.items():
        assert row["device_tokens"] == 256 * device_pages[ratio]
        assert row["logical_tokens"] == 256 * held_pages[ratio]
        assert row["host_bytes_needed"] == 2_883_584 * host_pages[ratio]
        assert row["binds"] == ("device" if ratio in (None, 1) else "host")
    assert rows[8]["gain"] == pytest.approx(0.5)
    assert list(rows) == [None, 1, 2, 4, 8]


def test_a_host_budget_that_is_just_enough_does_not_bind(kvoracle: Run, tmp_path: Path) -> None:
    device = ("--device-budget", 1000 * 2_976_512, "--ratio", 2, "--host-budget")
    assert fitted(kvoracle, tmp_path, *device, 1938 * 2_883_584)[2]["binds"] == "device"
    short = fitted(kvoracle, tmp_path, *device, 1938 * 2_883_584 - 1)[2]
    assert (short["binds"], short["logical_tokens"]) == ("host", 1937 * 256)


def test_budgets_of_one_page_hold_it(kvoracle: Run, tmp_path: Path) -> None:
    """At ratio 2 a device page is 11 * 1090 * 256 bytes, and its tokens want two host pages."""
    budgets = ("--device-budget", 3_069_440, "--host-budget", 2_883_584)
    row = fitted(kvoracle, tmp_path, *budgets, "--ratio", 2)[2]
    assert (row["device_tokens"], row["logical_tokens"], row["binds"]) == (256, 256, "host")


def test_every_size_counts(kvoracle: Run, tmp_path: Path) -> None:
    """4 layers of 2 are 2 DSA layers; a page of 8 * 16 = 128 tokens has 16 keys of 64 + 4 bytes;
    packed rows of 256 channels have 256 + 2 * 4 bytes: 2 * (128 * 264 + 2 * 16 * 68) = 71,936
    bytes a page at ratio 2, an index of 8.5 bytes a token."""
    shape = ("--layers", 4, "--dsa-period", 2, "--latent", 256, "--index-dim", 64)
    pool = ("--kpool", 8, "--physical-page-size", 16, "--row-format", "fp8_packed")
    budgets = ("--device-budget", 10 * 71_936, "--host-budget", "1GB")
    rows = fitted(kvoracle, tmp_path, *shape, *pool, *budgets, "--ratio", 2)
    assert rows[2]["logical_tokens"] == 2 * 10 * 128
    assert rows[2]["host_bytes_needed"] == 2 * 10 * 128 * 264 * 2
    short = ("--device-budget", 10 * 71_936 - 1, "--host-budget", "1GB")
    rows = fitted(kvoracle, tmp_path, *shape, *pool, *short, "--ratio", 2)
    assert rows[2]["logical_tokens"] == 2 * 9 * 128


SHORT = ("capacity", "--device-budget", "2976512000", "--host-budget", "4.33GB")
"""1,000 device pages; the host holds 1,501 pages, fewer than any ratio above 1 wants."""


def test_prints_the_table(kvoracle: Run) -> None:
    status, out, _ = kvoracle(*SHORT)
    assert status == 0
    assert "kpool 4, logical page 256 tokens, 11 DSA layers, bf16 rows of 1024 bytes" in out
    assert "device budget 2.97651 GB, host budget 4.33 GB" in out
    printed = [re.findall(r"[^\s│]+", line) for line in out.splitlines() if "│" in line]
    assert ["off", "256,000", "256,000", "0", "device"] in printed
    assert ["2", "248,064", "384,256", "5,588,385,792", "+50.1", "%", "host"] in printed


def height(bar: ET.Element) -> float:
    """The height of a rectangle's path."""
    path = next(bar.iter(f"{SVG}path")).attrib["d"]
    ordinates = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)]
    return max(ordinates) - min(ordinates)


def test_the_bars_of_an_svg_stand_for_the_tokens(kvoracle: Run, tmp_path: Path) -> None:
    status, _, err = kvoracle(*SHORT, "--ratio", "4", "--ratio", "1", "--chart", tmp_path / "x.svg")
    assert status == 0, err
    root = ET.fromstring((tmp_path / "x.svg").read_bytes())
    texts = {"".join(text.itertext()) for text in root.iter(f"{SVG}text")}
    assert {"256,000", "+0.0 %", "384,256", "+50.1 %", "HiSparse off: 256,000"} <= texts
    assert {"device budget binds", "host budget binds", "what the device could index"} <= texts
    assert {"logical tokens", "HiSparse ratio (logical tokens a device token)"} <= texts
    assert any("11 DSA layers, bf16 rows of 1024 bytes" in text for text in texts)
    assert any("host budget 4.33 GB" in text for text in texts)
    bars = {group.get("id"): group for group in root.iter(f"{SVG}g")}
    enough, short = bars["ratio-1"], bars["ratio-4"]
    assert height(short) / height(enough) == pytest.approx(384_256 / 256_000, rel=1e-5)
    drawn = ET.tostring(root, encoding="unicode")
    assert "fill: #2f6690" in ET.tostring(enough, encoding="unicode")
    assert "fill: url(#" in ET.tostring(short, encoding="unicode"), "hatched"
    assert 'fill="#e08e45"' in drawn


def test_an_svg_is_the_same_each_time_and_needs_no_legend_of_what_is_not_there(
    kvoracle: Run, tmp_path: Path
) -> None:
    roomy = ("capacity", "--device-budget", "28GB", "--host-budget", "1TB", "--chart")
    for name in ("a.svg", "b.svg"):
        assert kvoracle(*roomy, tmp_path / name)[0] == 0
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes()
    assert b"device budget binds" in drawn
    assert b"host budget binds" not in drawn


def test_a_png_has_its_size(kvoracle: Run, tmp_path: Path) -> None:
    assert kvoracle(*SHORT, "--chart", tmp_path / "x.PNG")[0] == 0
    data = (tmp_path / "x.PNG").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (9 * 160, 880)
    assert len(data) > 20_000


def test_a_chart_of_more_than_64_bits(kvoracle: Run, tmp_path: Path) -> None:
    huge = f"{'9' * 18}TB"
    budgets = ("--device-budget", huge, "--host-budget", huge)
    assert kvoracle("capacity", *budgets, "--chart", tmp_path / "x.svg")[0] == 0


@given(
    st.integers(1, 10**9),
    st.sampled_from([("", 1), ("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9)]),
    st.sampled_from(["", " "]),
)
def test_bytes_of_units(number: int, unit: tuple[str, int], space: str) -> None:
    name, size = unit
    assert capacity.bytes_of(f"{number}{space if name else ''}{name}") == number * size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("40GiB", 42_949_672_960),
        ("40gib", 42_949_672_960),
        ("1.5TB", 1_500_000_000_000),
        ("0.5KiB", 512),
        ("2MiB", 2_097_152),
        ("1TiB", 1_099_511_627_776),
    ],
)
def test_bytes_of_a_budget(text: str, count: int) -> None:
    assert capacity.bytes_of(text) == count


@pytest.mark.parametrize(
    ("arguments", "cause", "cure"),
    [
        (["--device-budget", "-5GB"], "'-5GB' is no budget", "give a positive number of bytes"),
        (["--device-budget", "0"], "'0' is no budget", "give a positive number of bytes"),
        (["--host-budget", "0GB"], "'0GB' is no budget", "such as 96GB"),
        (["--host-budget", "0.4B"], "'0.4B' is no budget", "such as 96GB"),
        (["--host-budget", "many"], "'many' is no budget", "40GiB (powers of 1024)"),
        (["--host-budget", "5XB"], "'5XB' is no budget", "40GiB (powers of 1024)"),
        (["--host-budget", "1e9"], "'1e9' is no budget", "40GiB (powers of 1024)"),
        (["--host-budget", "٣GB"], "'٣GB' is no budget", "40GiB (powers of 1024)"),
        (["--host-budget", ""], "'' is no budget", "40GiB (powers of 1024)"),
        (["--device-budget", "1kB"], "holds not one page of 2,976,512", "at least 2976512 bytes"),
        (["--host-budget", "1kB"], "holds not one page of 2,883,584", "at least 2883584 bytes"),
        (["--ratio", "999999"], "at ratio 999999", "raise it to at least"),
        (["--ratio", "0"], "'0' is no ratio", "a whole number from 1"),
        (["--ratio", "2", "--ratio", "-1"], "'-1' is no ratio", "a whole number from 1"),
        (["--ratio", "1.5"], "'1.5' is no ratio", "a whole number from 1"),
        (["--kpool", "3"], "no multiple of kpool 3", "choose a page size that kpool divides"),
        (["--kpool", "-4", "--physical-page-size", "-64"], "kpool is -4", "at least 1"),
        (["--physical-page-size", "0"], "physical_page_size is 0", "at least 1"),
        (["--latent", "0"], "latent is 0", "at least 1"),
        (["--index-dim", "100"], "index_dim 100 is no power of two", "choose one"),
        (["--layers", "3"], "hold no DSA layer", "set layers to at least 4"),
        (["--layers", "1000000000"], '"1000000000" for --layers', "<= 10000"),
        (["--dsa-period", "0"], "dsa_period is 0", "at least 1"),
        (["--row-format", "fp4"], '"fp4" for --row-format', "Choose from"),
        (["--chart", "x.pdf"], "x.pdf names no format", "end in .png or .svg"),
        (["--chart", "x"], "x names no format", "end in .png or .svg"),
        (["--chart", "/nowhere/x.svg"], "cannot be written", "name a file in a folder"),
        (["--json", "/nowhere/x.json"], "cannot be written", "name a file in a folder"),
        (["--json", "out.svg", "--chart", "out.svg"], "both --json and --chart", "name two files"),
        (["--ratio", "1000000"], "'1000000' is no ratio", "from 1 to 999,999"),
    ],
)
def test_bad_input_gets_one_sentence(
    kvoracle: Run, arguments: list[str], cause: str, cure: str
) -> None:
    budgets = {"--device-budget": "28GB", "--host-budget": "50GB"}
    rest = [
        part for name, value in budgets.items() if name not in arguments for part in (name, value)
    ]
    said = sentence(*kvoracle("capacity", *arguments, *rest))
    assert cause in said
    assert cure in said


def test_a_budget_is_needed(kvoracle: Run) -> None:
    said = sentence(*kvoracle("capacity", "--device-budget", "28GB"))
    assert "--host-budget requires an argument" in said


def test_a_full_disk_costs_neither_the_table_nor_the_json(kvoracle: Run, tmp_path: Path) -> None:
    (tmp_path / "x.svg").symlink_to("/dev/full")
    result = tmp_path / "x.json"
    status, out, err = kvoracle(*SHORT, "--chart", tmp_path / "x.svg", "--json", result)
    said = sentence(status, out, err)
    assert "No space left on device" in said
    assert "384,256" in out
    assert json.loads(result.read_bytes())["host_budget_bytes"] == 4_330_000_000
