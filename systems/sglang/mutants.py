"""Faults of one token or so in SGLang's own k-pool code, for a process that has yet to load it.

A mutant names a function of SGLang, a regular expression that matches one place in it, and what
stands there instead.  The changed text is compiled in memory as its module is imported; where it
came from stays as it was.  They are written for release 0.5.23 and say so where they fit no more.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

PLAN = "sglang.srt.layers.attention.dsa.kpool_plan"
KERNELS = "sglang.srt.layers.attention.dsa.kpool_fp8_index"
MEMORY = "sglang.srt.mem_cache.memory_pool"
PAGES = "sglang.srt.mem_cache.allocator.paged"
SLOTS = "sglang.srt.mem_cache.allocator.mamba"
TREE = "sglang.srt.mem_cache.unified_radix_cache"
FULL = "sglang.srt.mem_cache.unified_cache.components.full"
STATES = "sglang.srt.mem_cache.unified_cache.components.mamba"
POLICY = "sglang.srt.mem_cache.evict_policy"
BATCH = "sglang.srt.managers.schedule_batch"
COMMON = "sglang.srt.mem_cache.common"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
VERIFY_PLAN = "_update_kpool_write_plan_kernel"
VERIFY = "_kpool_write_tail_and_maybe_compress_kernel"
COMMIT = "_fused_commit_track_indices_kernel"
WRITE = "_kpool_assemble_softmax_rotate_write_cache_kernel"
DECODE = "_kpool_decode_update_and_maybe_write_cache_kernel"
GATHER = "_gather_index_k_scale_prefix_into_kernel"


class MutantError(RuntimeError):
    """A mutant fits no place, or more than one, of this release; or it came too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault.

    Fields:
        what: goes wrong.
        module, function: where; a method by its own name.
        pattern: a regular expression, which matches in that function once.
        put: what replaces the match, as `re.sub` reads it.
    """

    what: str
    module: str
    function: str
    pattern: str
    put: str


def _mutant(what: str, module: str, function: str, pattern: str, put: str) -> Mutant:
    return Mutant(what=what, module=module, function=function, pattern=pattern, put=put)


MUTANTS: dict[str, Mutant] = {
    # the plan of a prefill
    "group_closes_early": _mutant(
        "a chunk closes a group one token too soon",
        PLAN, "_decompose_compress", r"\(start \+ length\)", "(start + length + 1)",
    ),
    "groups_overlap": _mutant(
        "all groups but a chunk's first start a token early",
        PLAN, "_append_compress_rows", r"(bulk_start = q_offset \+ kpool)", r"\1 - 1",
    ),
    "first_chunk_row_for_all": _mutant(
        "a group's keys are looked for without the chunks before its own",
        PLAN, "_append_compress_rows", r"q_offset \+= q_len", "q_offset += 0",
    ),
    "tail_row_of_the_batch": _mutant(
        "a tail's keys are looked for without the chunks before its own",
        PLAN, "_append_compress_rows", r"append\(q_offset \+ consumed\)", "append(consumed)",
    ),
    "tail_one_short": _mutant(
        "the last position of a tail is not stored",
        PLAN, "_append_compress_rows", r"append\(d\.tail_n_write\)", "append(d.tail_n_write - 1)",
    ),
    "ring_by_place_in_the_batch": _mutant(
        "a tail goes to the ring of the request's place in the batch",
        PLAN, "_append_compress_rows", r"req_pool_indices_cpu\[i\]", "i",
    ),
    "write_page_of_one_column": _mutant(
        "the page of a pooled key is looked up one physical page a group of pages",
        PLAN, "_kpool_plan_to_gpu", r"pool_page_group \* kpool", "pool_page_group",
    ),
    "write_page_by_the_first_request": _mutant(
        "the page of a pooled key is that of the batch's first request",
        PLAN, "_kpool_plan_to_gpu", r"\[pool_batch_idx_t, token", "[pool_batch_idx_t * 0, token",
    ),
    "write_physical_page": _mutant(
        "a pooled key's physical page is taken for its logical one",
        PLAN, "_kpool_plan_to_gpu", r"(\n +)// kpool\n", r"\1// 1\n",
    ),
    "write_slot_of_the_chunk": _mutant(
        "a pooled key's slot in its page is one too high",
        PLAN, "_kpool_plan_to_gpu",
        r"(torch\.remainder\(\n +)pool_pool_id_t", r"\1pool_pool_id_t + 1",
    ),
    "write_page_stride": _mutant(
        "pages of pooled keys lie kpool slots apart",
        PLAN, "_kpool_plan_to_gpu", r"packed_page \* index_page_size", "packed_page * kpool",
    ),
    # the kernel that pools a prefill's keys
    "prefill_forgets_weights": _mutant(
        "every position of a group is weighed as the first",
        KERNELS, WRITE, r"slot \* ape_stride_0", "slot * 0",
    ),
    "prefill_pools_one_key": _mutant(
        "a group's keys are all its first",
        KERNELS, WRITE, r"\(slot - n_tail\)", "(0 * slot)",
    ),
    "softmax_keeps_the_old": _mutant(
        "keys that were weighed down stay in the sum",
        KERNELS, WRITE, r"acc \* rescale", "acc",
    ),
    "prefill_scale_of_the_first_slot": _mutant(
        "all scales of a page go to its first slot",
        KERNELS, WRITE,
        r"(// 4\n +\+) loc_token_offset_in_page", r"\1 0 * loc_token_offset_in_page",
    ),
    "prefill_scale_among_keys": _mutant(
        "scales lie in the middle of their page",
        KERNELS, WRITE, r"\+ S_OFFSET_NBYTES_IN_PAGE // 4", "+ S_OFFSET_NBYTES_IN_PAGE // 8",
    ),
    "key_row_stride": _mutant(
        "the keys of a page overlap",
        KERNELS, "_kpool_cache_k_offsets",
        r"(PAGE \+ slot \* HEAD_DIM) \+ cols", r"\1 // 2 + cols",
    ),
    "hadamard_lacks_a_stage": _mutant(
        "the rotation lacks its last stage",
        KERNELS, "_hadamard128", r"x = _hadamard128_stage\(x, 1, 64\)", "x = x",
    ),
    "hadamard_adds_twice": _mutant(
        "a stage of the rotation adds where it should subtract",
        KERNELS, "_hadamard128_stage", r"a - b", "a + b",
    ),
    "scale_rounded_down": _mutant(
        "a scale is rounded down, and its key cut off",
        KERNELS, "_hadamard_quantize_fp8", r"tl\.ceil", "tl.floor",
    ),
    "scale_of_the_sum": _mutant(
        "a key is stored without being divided by its scale",
        KERNELS, "_hadamard_quantize_fp8", r"x / scale", "x",
    ),
    "tail_scatter_repeats": _mutant(
        "all positions of a tail are its first",
        KERNELS, "_scatter_kpool_tail_updates_kernel", r"\+ row\) \+ slot", "+ row)",
    ),
    "tail_scatter_ring_of_the_row": _mutant(
        "tails are stored by their place in the batch",
        KERNELS, "_scatter_kpool_tail_updates_kernel",
        r"tl\.load\(req_pool_idx_ptr \+ row\)", "row",
    ),
    # the kernel of a decode
    "decode_closes_early": _mutant(
        "a group closes at its third position",
        KERNELS, DECODE, r"slot == POOL_SIZE - 1", "slot == POOL_SIZE - 2",
    ),
    "decode_never_closes": _mutant(
        "a group that a decode completes is not stored",
        KERNELS, DECODE, r"slot == POOL_SIZE - 1", "slot == POOL_SIZE",
    ),
    "decode_reads_the_ring_for_the_newest": _mutant(
        "the newest key of a group is read from the ring, where it is not yet",
        KERNELS, DECODE, r"where\(is_current, key", "where(is_current & False, key",
    ),
    "decode_gate_of_the_ring": _mutant(
        "the last position of a group is weighed by what the ring held",
        KERNELS, DECODE,
        r"(?s)(max_score = tl\.full.*?)where\(is_current", r"\1where(is_current & False",
    ),
    "decode_page_by_the_first_request": _mutant(
        "the page of a pooled key is that of the batch's first request",
        KERNELS, DECODE, r"\+ row \* block_tables_stride_0", "+ 0 * row * block_tables_stride_0",
    ),
    "decode_physical_page": _mutant(
        "a pooled key's physical page is taken for its logical one",
        KERNELS, DECODE, r"to\(tl\.int64\) // POOL_SIZE", "to(tl.int64)",
    ),
    "decode_slot_by_position": _mutant(
        "a pooled key's slot is that of its position",
        KERNELS, DECODE, r"pool_id % INDEX_PAGE_SIZE", "safe_pos % INDEX_PAGE_SIZE",
    ),
    "decode_ring_row_off": _mutant(
        "a position waits in the row behind its own",
        KERNELS, DECODE,
        r"phys_slot = safe_pos % TAIL_SIZE", "phys_slot = (safe_pos + 1) % TAIL_SIZE",
    ),
    "decode_ring_of_the_row": _mutant(
        "tails are kept by their place in the batch",
        KERNELS, DECODE, r"tl\.load\(req_pool_indices_ptr \+ row\)", "row",
    ),
    "decode_forgets_the_tail": _mutant(
        "the newest key is not kept",
        KERNELS, DECODE, r"dim_mask & pos_valid", "dim_mask & pos_valid & (slot == 0)",
    ),
    "decode_scale_of_the_first_slot": _mutant(
        "all scales of a page go to its first slot",
        KERNELS, DECODE,
        r"(// 4\n +\+) loc_token_offset_in_page", r"\1 0 * loc_token_offset_in_page",
    ),
    "evicts_the_most_recent": _mutant(
        "eviction begins with the prefix that was used last",
        POLICY, "get_priority", r"return node\.last", "return -node.last",
    ),
    # the plan and the kernel of a verify, and what is kept of it
    "verify_page_by_the_first_request": _mutant(
        "the page of a draft's pooled key is that of the batch's first request",
        KERNELS, VERIFY_PLAN, r"\(b \* N\)\.to", "(b * 0).to",
    ),
    "verify_row_of_the_batch": _mutant(
        "a request's page table is looked for as though each had one draft",
        KERNELS, VERIFY_PLAN, r"\(b \* N\)\.to", "(b * 1).to",
    ),
    "verify_physical_page": _mutant(
        "a pooled key's physical page is taken for its logical one",
        KERNELS, VERIFY_PLAN, r"(\n +)// POOL_SIZE\n", r"\1// 1\n",
    ),
    "verify_tail_from_the_first_draft": _mutant(
        "a group is pooled from the first draft on",
        KERNELS, VERIFY_PLAN, r"\(base_pool \* POOL_SIZE\)\.to", "(ws + 0).to",
    ),
    "verify_first_group_only": _mutant(
        "of the groups that a verify closes, all but the first are left as they were",
        KERNELS, VERIFY, r"if p < n_pool", "if (p < n_pool) & (p < 1)",
    ),
    "verify_ring_of_a_group": _mutant(
        "drafts go round a ring of kpool rows",
        KERNELS, VERIFY, r"\(write_start \+ i_n\) % TAIL_SIZE", "(write_start + i_n) % POOL_SIZE",
    ),
    "verify_rows_of_the_first_request": _mutant(
        "the drafts of all requests are those of the first",
        KERNELS, VERIFY, r"row = b \* N \+ i_n", "row = 0 * b + i_n",
    ),
    "verify_commits_one_short": _mutant(
        "the last draft that is kept is not counted",
        RESULTS, "_resolve_spec_v2_tokens",
        r"kv_committed_len \+= num_accept_tokens", "kv_committed_len += num_accept_tokens - 1",
    ),
    "verify_keeps_the_first_state": _mutant(
        "the state of a request is that behind its first draft",
        SCATTER, COMMIT, r"row \+ al - 1", "row + 0 * al",
    ),
    "verify_reserve_leaks": _mutant(
        "pages that were reserved for drafts are not given back",
        COMMON, "_release_overallocated_kv_indices", r"if start_p < end_p", "if end_p < 0",
    ),
    # the read path
    "read_physical_pages": _mutant(
        "the pooled page table keeps physical pages",
        KERNELS, "build_pooled_page_table_64", r" // kpool\n*$", "\n",
    ),
    "read_every_column": _mutant(
        "the pooled page table takes every column",
        KERNELS, "build_pooled_page_table_64", r"shape\[-1\], kpool", "shape[-1], 1",
    ),
    "read_first_page": _mutant(
        "all pooled keys are read from the first page",
        KERNELS, GATHER, r"page_indices_ptr \+ page_idx", "page_indices_ptr + 0 * page_idx",
    ),
    "read_scale_of_the_first_slot": _mutant(
        "all keys of a page are read with the scale of the first",
        KERNELS, GATHER, r"\+ token_offset_in_page", "+ 0 * token_offset_in_page",
    ),
    # allocation
    "pages_not_taken": _mutant(
        "pages that a prefill takes stay free",
        PAGES, "alloc_extend", r"free_pages\[num_new_pages:\]", "free_pages[0:]",
    ),
    "page_of_a_decode_not_taken": _mutant(
        "the page that a decode takes stays free",
        PAGES, "alloc_decode", r"free_pages\[num_new_pages:\]", "free_pages[0:]",
    ),
    "pages_of_two_requests": _mutant(
        "the second request of a prefill gets the pages of the first",
        PAGES, "alloc_extend_naive",
        r"end_new_pages - pages_per_req", "0 * (end_new_pages - pages_per_req)",
    ),
    "padding_state_handed_out": _mutant(
        "slots of the state pool are handed out from its padding on",
        SLOTS, "clear", r"(arange\(\n +)1,", r"\g<1>0,",
    ),
    # the tree and its states
    "state_stays_above_a_split": _mutant(
        "a node that is split leaves its state to the upper part too",
        STATES, "redistribute_on_node_split",
        r"(component_data\[ct\])\.value = None", r"\1.value = child.component_data[ct].value",
    ),
    "split_lock_forgotten": _mutant(
        "the upper part of a node that is split is locked by nobody",
        FULL, "redistribute_on_node_split",
        r"\.lock_ref = child\.component_data\[ct\]\.lock_ref", ".lock_ref = 0",
    ),
    "state_not_copied": _mutant(
        "a hit's state is not copied to the request that resumes it",
        STATES, "finalize_match_result_in_cache",
        r"mamba_cow_src_index = src_index", "mamba_cow_src_index = None",
    ),
    "prefix_freed_with_its_request": _mutant(
        "a request that leaves frees what it shares",
        COMMON, "release_kv_cache", r"\(req\.kv\.cache_protected_len, owned", "(0, owned",
    ),
    "lock_kept": _mutant(
        "a request that leaves keeps its lock",
        COMMON, "release_kv_cache", r"tree_cache\.unlock\(req\.lock\)", "pass",
    ),
    "tracked_depth_off": _mutant(
        "a state is kept under a prefix that is a page longer",
        BATCH, "_mamba_radix_cache_v2_req_prepare_for_extend",
        r"mamba_last_track_seqlen = mamba_track_seqlen_aligned",
        "mamba_last_track_seqlen = mamba_track_seqlen_aligned - checkpoint_grid",
    ),
    "request_keeps_its_duplicate": _mutant(
        "a request goes on with its own copies of pages that the tree had already",
        TREE, "checkpoint_into_tree", r"new_indices\[req\.kv\.cache_protected_len :\]",
        "kv_indices[req.kv.cache_protected_len : len(new_indices)]",
    ),
    "donor_keeps_the_state": _mutant(
        "the slot whose state goes to the tree stays the request's",
        MEMORY, "donate_mamba_ping_pong_slot", r"new_slot\[0\]", "mamba_value_donated[0]",
    ),
}  # fmt: skip
"""By name."""


def plant(name: str) -> None:
    """Have this process import SGLang with a fault.

    Raises:
        MutantError: its module is imported already, or its pattern does not fit.
    """
    mutant = MUTANTS[name]
    if mutant.module in sys.modules:
        raise MutantError(
            f"{mutant.module} is imported already: plant {name} before SGLang is loaded."
        )
    sys.meta_path.insert(0, _Finder(mutant))


def mutated(mutant: Mutant, source: str) -> str:
    """The text of the mutant's module, changed."""
    spans = [
        (node.lineno - 1, node.end_lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == mutant.function
    ]
    lines = source.splitlines(keepends=True)
    bodies = ["".join(lines[start:stop]) for start, stop in spans]
    counts = [len(re.findall(mutant.pattern, body)) for body in bodies]
    if sum(counts) != 1:
        raise MutantError(
            f"{mutant.pattern!r} fits {sum(counts)} places of {mutant.function} in "
            f"{mutant.module}: write it anew for this release."
        )
    place = counts.index(1)
    start, stop = spans[place]
    body = re.sub(mutant.pattern, mutant.put, bodies[place])
    return "".join([*lines[:start], body, *lines[stop:]])


class _Finder(MetaPathFinder):
    """Finds the module of one mutant."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self._mutant)
        return spec


class _Loader(SourceFileLoader):
    """Compiles a module's changed text, under a name by which its lines can be looked up."""

    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        text = mutated(self._mutant, Path(self.path).read_text())
        # Triton reads a kernel's text by the file that its code names
        name = f"<{self._mutant.what}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return compile(text, name, "exec", dont_inherit=True)
