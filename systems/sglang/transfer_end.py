"""One rank of SGLang's prefill or decode instance, in a process of its own, called over a pipe.

What moves a request is SGLang's: the NIXL manager with its threads, the sender, the receiver, the
decode transfer queue, and the prefill scheduler's poll.  What stands around them here does nothing:
a scheduler without a model, a tree that keeps nothing, a bootstrap server that only knows the one
peer.  Every row names who wrote it, so that a count of words tells what landed where.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from systems.sglang.transfer_wire import Gate, Mail, open_mail

PAGES, PAGE_BYTES, LAYERS = 16, 16384, 2
CANARY = 0x5AFE5AFE5AFE5AFE
ADDRESS = "127.0.0.1"
PREFILL_PORT, DECODE_PORT = 7000, 8000
"""Ports of rank 0; they only name who a message is for."""


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"sglang.srt.disaggregation.{name}")


class Quiet:
    """A part of SGLang that is told things, and asked nothing."""

    def __init__(self, **members: Any) -> None:
        vars(self).update(members)

    def __getattr__(self, name: str) -> Quiet:
        if name.startswith("__"):
            raise AttributeError(name)
        return Quiet()

    def __call__(self, *_: Any, **__: Any) -> Quiet:
        return self

    def __bool__(self) -> bool:
        return False


def _settings(rank: int, ranks: int) -> Callable[[], SimpleNamespace]:
    """All that these parts read of SGLang's configuration; TP `ranks` on both sides."""
    group = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
    values = SimpleNamespace(
        **{f"{axis}_{what}": 0 if what == "rank" else 1 for axis in ("attn_cp", "attn_dcp",
           "attn_dp", "pp", "dp") for what in ("rank", "size")},
        attn_tp_size=ranks, attn_tp_rank=rank, tp_size=ranks, tp_rank=rank, num_dp_ranks=1,
        attn_tp_group=group, pp_group=None, dist_init_addr=None, enable_dp_attention=False,
        enable_dsa_cache_layer_split=False, enable_kv_cache_sharding=False,
        enable_cp_tp_group_sharing=False, load_balance_method="round_robin",
        host=ADDRESS, device="cpu", disaggregation_bootstrap_port=0, enable_trace=False,
        disaggregation_decode_allocation_policy="early",
        disaggregation_transfer_backend="nixl", disaggregation_decode_enable_radix_cache=False,
    )  # fmt: skip
    return lambda: values


def _configure(rank: int, ranks: int, host_receive_off: float) -> None:
    """Let SGLang's modules read these settings, and register at no bootstrap server."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['KVORACLE_RENDEZVOUS']}",
        rank=rank,
        world_size=ranks,
    )
    values = _settings(rank, ranks)
    values().disaggregation_decode_host_receive_threshold = host_receive_off
    asked = ("get_parallel", "get_serving", "get_disagg", "get_device", "get_observability")
    given: dict[str, Any] = dict.fromkeys(asked, values)
    given |= {"get_local_ip_auto": lambda: ADDRESS, "linear_attn_tp_size": lambda: ranks}
    for name in ("common.conn", "nixl.conn", "decode", "prefill", "utils"):
        module = _module(name)
        for attribute in given.keys() & vars(module).keys():
            setattr(module, attribute, given[attribute])
    manager = _module("common.conn").CommonKVManager
    manager.register_to_bootstrap = lambda self: None
    manager._sync_bootstrap_port_across_nodes = lambda self, port: port
    manager._start_heartbeat_checker_thread = lambda self: None


class End:
    """What both sides have: memory that NIXL knows, a manager, and a tick that notes rounds."""

    mode: str

    def __init__(
        self, mail: Mail, *, rank: int, ranks: int, rows: int, host_receive_off: float
    ) -> None:
        _configure(rank, ranks, host_receive_off)
        self.mail, self.rank, self.ranks = mail, rank, ranks
        self.words = torch.full((LAYERS, PAGES, PAGE_BYTES // 8), CANARY, dtype=torch.int64)
        utils = _module("utils")
        self.rows = utils.MetadataBuffers(rows, 16, torch.bfloat16, max_sampling_mask_tokens=1)
        pointers, lengths, items = self.rows.get_buf_infos()
        arguments = _module("base.conn").KVArgs()
        vars(arguments).update(
            engine_rank=rank, gpu_id=0, ib_device="", page_size=1, pp_rank=0, system_dp_rank=0,
            kv_data_ptrs=[layer.data_ptr() for layer in self.words],
            kv_data_lens=[PAGES * PAGE_BYTES] * LAYERS, kv_item_lens=[PAGE_BYTES] * LAYERS,
            kv_layer_ids=list(range(LAYERS)), kv_data_mem_kinds=["DRAM"] * LAYERS,
            kv_cache_dtype_str="auto", kv_layout=None, mla_compression_ratios=None,
            aux_data_ptrs=pointers, aux_data_lens=lengths, aux_item_lens=items,
            state_types=[], state_data_ptrs=[], state_data_lens=[], state_item_lens=[],
            state_layer_ids=[], state_dim_per_tensor=[], prefill_start_layer=0,
            prefill_end_layer=LAYERS, num_draft_entries=0, kv_head_num=1, total_kv_head_num=ranks,
        )  # fmt: skip
        mode = getattr(utils.DisaggregationMode, self.mode)
        quiet = SimpleNamespace(enable_pd_role_switch=False)
        self.manager = _module("nixl.conn").NixlKVManager(arguments, mode, quiet, True)

    def request(self, room: int, name: int, row: int, **more: Any) -> Quiet:
        """A request of ours; its pages are freed through the note ("released", name)."""
        return Quiet(
            rid=name, name=name, bootstrap_room=room, bootstrap_host=ADDRESS, output_ids=[],
            finished_reason=None, metadata_buffer_index=row, **more,
        )  # fmt: skip

    def deliver(self, frames: list[bytes]) -> None:
        """Hand over a control message, and wait until it was handled."""
        self.mail.deliver(frames)

    def journal(self) -> list[tuple[Any, ...]]:
        """What happened since the last call."""
        return self.mail.drain()

    def status(self, room: int) -> int | None:
        """What the manager's table says of a room."""
        return self.manager.request_status.get(room)

    def stamp(self, word: int, pages: list[int]) -> None:
        """Fill pages, as their owner does."""
        self.words[:, pages] = word

    def count(self, word: int, pages: list[int]) -> int:
        """How many words of the pages are that one."""
        return int((self.words[:, pages] == word).sum())


class PrefillEnd(End):
    """A rank of P.  Its pages are released by SGLang's poll of what is in flight."""

    mode = "PREFILL"

    def __init__(self, mail: Mail, *, rank: int, **common: Any) -> None:
        queue = _module("common.utils").FastQueue
        take = queue.get
        gates: list[Gate] = []

        def get(this: Any) -> Any:
            if gates:
                gates[0].idle()
            chunk = take(this)
            gates[0].dequeued(chunk.room)
            return chunk

        queue.get = get
        super().__init__(mail, rank=rank, **common)
        self.gate = Gate(self.manager.agent, mail)
        self.manager.agent = self.gate
        gates.append(self.gate)
        self.requests: dict[int, Quiet] = {}
        prefill = _module("prefill")
        prefill.release_kv_cache = lambda request, *_, **__: mail.note("released", request.name)
        group = torch.distributed.group.WORLD
        single = torch.distributed.new_group([rank], use_local_synchronization=True)
        kind = type("Scheduler", (prefill.SchedulerDisaggregationPrefillMixin, Quiet), {})
        self.scheduler = kind(
            disagg_prefill_inflight_queue=[], attn_cp_cpu_group=single, attn_tp_cpu_group=group
        )  # fmt: skip

    def start(self, room: int, name: int, pages: int, row: int) -> None:
        """Begin with a request whose KV will be sent, in `pages` pages, and its row."""
        kind = _module("nixl.conn").NixlKVSender
        more = {"dest_tp_ranks": [self.rank], "pp_rank": 0}
        known = inspect.signature(kind.__init__).parameters
        given = {key: value for key, value in more.items() if key in known}
        sender = kind(self.manager, ADDRESS, room, **given)
        sender.init(pages, row)
        request = self.request(room, name, row, disagg_kv_sender=sender, pending_bootstrap=False)
        self.requests[name] = request

    def fill_row(self, row: int, room: int, token: int) -> None:
        """Write the row that goes with the last chunk."""
        self.rows.bootstrap_room[row, 0] = room
        self.rows.output_ids[row, 0] = token

    def send(self, name: int, pages: list[int]) -> None:
        """Queue all pages of a request for the transfer worker; it is in flight from now on."""
        request = self.requests.pop(name)
        request.disagg_kv_sender.send(np.array(pages, dtype=np.int32))
        self.scheduler.disagg_prefill_inflight_queue.append(request)

    def tick(self, number: int) -> None:
        """One poll of what is in flight."""
        self.mail.note("round_of", number, len(self.scheduler.disagg_prefill_inflight_queue))
        self.scheduler.process_disagg_prefill_inflight_queue()

    def left(self) -> list[int]:
        """Requests that are in flight, by name."""
        return [request.name for request in self.scheduler.disagg_prefill_inflight_queue]

    def shut(self) -> None:
        """Hold writes back from now on."""
        self.gate.is_shut = True

    def refuse(self) -> None:
        """Let every post fail from now on."""
        self.gate.refuses = True

    def keep(self) -> None:
        """Hold back for ever what is held, and let through what comes."""
        self.gate.is_shut = False

    def open(self) -> None:
        self.gate.open()


class DecodeEnd(End):
    """A rank of D.  Its pages are released by SGLang's queue of transfers.

    With `hisparse` the pages are HiSparse's host rows, which the coordinator frees.
    """

    mode = "DECODE"

    def __init__(self, mail: Mail, *, rows: int, hisparse: bool = False, **common: Any) -> None:
        super().__init__(mail, rows=rows, **common)
        decode, utils = _module("decode"), _module("utils")
        self.hisparse = hisparse

        def released(request: Quiet, *_: Any, **__: Any) -> None:
            mail.note("released", request.name)

        decode.release_kv_cache = (lambda *_, **__: None) if hisparse else released

        def streamed(requests: list[Quiet], *_: Any) -> None:
            for request in requests:
                mail.note("failed", request.name)

        scheduler = Quiet(
            enable_hisparse=hisparse, kv_checksum_computer=None,
            hisparse_coordinator=SimpleNamespace(request_finished=released),
            output_streamer=SimpleNamespace(stream_output=streamed),
            spec_algorithm=SimpleNamespace(is_none=lambda: True), disagg_decode_prealloc_queue=None,
        )  # fmt: skip
        group = {"gloo_group": torch.distributed.group.WORLD}
        known = inspect.signature(decode.DecodeTransferQueue.__init__).parameters
        self.queue = decode.DecodeTransferQueue(
            **{key: value for key, value in group.items() if key in known},
            req_to_metadata_buffer_idx_allocator=utils.ReqToMetadataIdxAllocator(rows),
            metadata_buffers=self.rows,
            scheduler=scheduler,
            tree_cache=Quiet(),
        )
        self.rows_free = self.queue.req_to_metadata_buffer_idx_allocator
        self.receivers: dict[int, Any] = {}

    def offer(self, room: int, name: int, pages: list[int]) -> None:
        """Reserve `pages` and a row for a request, and send their addresses to P."""
        conn = _module("nixl.conn")
        manager, port = self.manager, PREFILL_PORT + self.rank
        manager.prefill_info_table[ADDRESS] = SimpleNamespace(
            target_tp_rank=self.rank, target_tp_ranks=[self.rank], target_cp_ranks=[0],
            target_pp_ranks=[0], required_dst_info_num=1, required_prefill_response_num=1,
            attn_tp_size=self.ranks, attn_cp_size=1, pp_size=1, decode_allocation_policy="early",
        )  # fmt: skip
        receiver = conn.NixlKVReceiver(manager, ADDRESS, room)
        receiver._get_bootstrap_info_from_server = lambda *_: {
            "rank_ip": ADDRESS,
            "rank_port": port,
        }
        receiver.init(0)
        row = self.rows_free.alloc()
        request = self.request(room, name, row)
        self.receivers[name] = receiver
        receiver.send_metadata(np.array(pages, dtype=np.int32), aux_index=row)
        waiting = _module("decode").DecodeRequest(
            req=request, kv_receiver=receiver, metadata_buffer_index=row
        )
        self.queue.queue.append(waiting)

    def abort(self, name: int) -> None:
        """The client gave a request up, at D."""
        self.receivers[name].abort()

    def lose_prefill(self) -> None:
        """What the heartbeat thread does when the bootstrap server stopped answering."""
        self.manager._handle_node_failure(ADDRESS)

    def tick(self, number: int) -> None:
        """One turn of the scheduler: what came, and what may be released."""
        self.mail.note("round_of", number, len(self.queue.queue))
        for request in self.queue.pop_transferred():
            self.mail.note("live", request.name, request.output_ids[-1])
        self.queue.resolve_deferred_releases()

    def left(self) -> list[int]:
        """Requests that wait, and those whose release is deferred, by name."""
        entries = [*self.queue.queue, *(entry[0] for entry in self.queue._deferred_releases)]
        return [entry.req.name for entry in entries]

    def acks(self, room: int) -> int:
        """How many ACKs the manager counts for a room."""
        state = self.manager._deferred_abort_ack_tracker.get(room, ())
        return len(getattr(state, "prefill_ranks", state))


def serve(pipe: Connection, kind: type[End], port: int, arguments: dict[str, Any]) -> None:
    """Answer calls until the pipe is closed; an answer is (result, None) or (None, error)."""
    os.dup2(2, 1)  # UCX tells its errors there
    end = kind(open_mail(port), **arguments)
    pipe.send((os.getpid(), None))
    while True:
        try:
            name, *rest = pipe.recv()
        except EOFError:
            os._exit(0)  # SGLang's threads have no other end
        try:
            pipe.send((getattr(end, name)(*rest), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))
