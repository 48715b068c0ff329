"""A stock vLLM P2P tier in a process of its own, driven by JSON lines.

The whole scheduler side is vLLM's: tiering manager, primary tier, p2p tier, sessions, transports. Only the
engine is missing: a loop calls the end of a schedule every few milliseconds, and commands from standard input
stand for requests. One line in, one line out:

    ["meta"]                      another NIXL agent's metadata and memory, for a peer that has none of its own
    ["put", req, {key: byte}]     the request has computed blocks, each full of one byte; keys are hexadecimal
    ["new", req, params]          a request begins, with its kv_transfer_params
    ["lookup", req, [key]]        verdicts: HIT, HIT_PENDING, MISS, RETRY
    ["finish", req]
    ["sessions"]                  {peer: [ready, alive]}
    ["landed", index]             the first byte of a block of the memory that "meta" told of, if all are equal
    ["shutdown"]

Usage: p2p_stock_node.py PORT HASH_SEED
"""
import json
import logging
import os
import select
import sys
import uuid

CHUNK, CHUNKS = 4096, 16
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
logging.disable(logging.WARNING)


def configuration(port):
    from vllm.v1.kv_offload import config as c
    return c.OffloadingConfig(
        groups=(c.OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer.0",), group_id=0),),
        worker_kv_bytes_per_block=CHUNK, enable_kv_cache_events=False, engine_id=f"interop-{uuid.uuid4().hex[:8]}",
        extra_config={"cpu_bytes_to_use": CHUNKS * CHUNK,
                      "secondary_tiers": [{"type": "p2p", "host": "127.0.0.1", "port": port}]},
        model=c.OffloadingModelConfig(name="tiny", dtype="bfloat16"),
        cache=c.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=c.OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=True))


class Stock:
    def __init__(self, port, seed):
        import numpy
        from vllm.v1.core import kv_cache_utils
        kv_cache_utils._NONE_HASH_SEED = seed
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
        self.manager = TieringOffloadingSpec(configuration(port)).get_manager()
        self.tier = next(t for t in self.manager.secondary_tiers if t.tier_type == "p2p")
        view = self.manager.primary_tier.get_kv_memoryview()
        self.blocks = numpy.frombuffer(view, dtype=numpy.uint8).reshape(CHUNKS, -1)
        self.requests, self.down, self.other = {}, False, None

    def request(self, name, params=None):
        from vllm.v1.kv_offload.base import ReqContext
        if name not in self.requests:
            self.requests[name] = ReqContext(req_id=name, kv_transfer_params=params)
            self.manager.on_new_request(self.requests[name])
        return self.requests[name]

    def step(self):
        from vllm.v1.kv_offload.base import ScheduleEndContext
        if not self.down:
            self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def meta(self):
        import numpy
        from vllm.v1.kv_offload.tiering.p2p.data.nixl import NixlTransport
        self.memory = numpy.zeros((CHUNKS, CHUNK), dtype=numpy.uint8)
        self.other = NixlTransport(str(uuid.uuid4()), memoryview(self.memory))
        return {"metadata": self.other.get_agent_metadata().hex(), "base": self.other.base_addr,
                "blocks": self.other.num_blocks, "block_len": self.other.block_len,
                "fingerprint": self.other.config_fingerprint or ""}

    def put(self, name, content):
        request = self.request(name)
        prepared = self.manager.prepare_store([bytes.fromhex(k) for k in content], request)
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids):
            self.blocks[chunk, :] = content[bytes(key).hex()]
        self.manager.complete_store(prepared.keys_to_store, request, True)

    def new(self, name, params):
        self.request(name, params)

    def lookup(self, name, keys):
        return [self.manager.lookup(bytes.fromhex(k), self.request(name)).name for k in keys]

    def finish(self, name):
        self.manager.on_request_finished(self.requests.pop(name))

    def sessions(self):
        return {peer: [bool(s.ready), bool(s.alive)] for peer, s in self.tier._sessions.items()}

    def landed(self, index):
        block = self.memory[index]
        return int(block[0]) if (block == block[0]).all() else -1

    def shutdown(self):
        self.down = True
        self.manager.shutdown()


def main():
    stock = Stock(int(sys.argv[1]), sys.argv[2])
    print(json.dumps("up"), file=out, flush=True)
    while True:
        stock.step()
        if not select.select([sys.stdin], [], [], 0.003)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # without the destructors of the bundled libraries, some of which crash
        command, *args = json.loads(line)
        try:
            answer = {"ok": getattr(stock, command)(*args)}
        except Exception as e:  # the test says what it expected instead
            answer = {"error": repr(e)}
        print(json.dumps(answer), file=out, flush=True)


main()
