"""Paged KV bookkeeping in plain Python: lists, dicts and one block at a time.

The order of reuse is vLLM V1's: one free list, taken from its head; a freed block with a cached
prefix goes to the tail, one without to the head. Shares no code with the engine.
"""

from dataclasses import dataclass, field, replace


@dataclass
class Row:
    tokens: list[int]
    prompt_len: int
    max_len: int
    context_len: int = 0
    blocks: list[int] = field(default_factory=list)
    active: bool = True
    version: int = 0  # of the weights that its KV is computed with

    @property
    def gap(self) -> int:
        return len(self.tokens) - self.context_len


class BlockManager:
    """Blocks, rows and the prefix cache of one engine. `slots` mirrors what each slot holds."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.free = list(range(1, num_blocks))
        self.ref = dict.fromkeys(range(1, num_blocks), 0)
        self.prefix_of: dict[int, tuple] = {}  # block -> the whole prefix it ends
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (token, position)
        self.rows: dict[int, Row] = {}
        self.freed_at = dict.fromkeys(range(1, num_blocks), 0)
        self.num_freed = 0
        self.version = 0  # of the weights that rows seated now compute with

    def match(self, tokens: list[int]) -> list[int]:
        hits = []
        for end in range(self.block_size, len(tokens), self.block_size):  # one token must run
            wanted = (self.version, *tokens[:end])
            found = [b for b, prefix in self.prefix_of.items() if prefix == wanted]
            if not found:
                break
            hits.append(min(found))
        return hits

    def admit(self, row_id: int, row: Row, *, reads_cache: bool = True) -> int:
        row.version = self.version
        row.blocks = self.match(row.tokens) if reads_cache else []
        for block in row.blocks:
            self._hold(block)
        row.context_len = len(row.blocks) * self.block_size
        self.rows[row_id] = row
        return row.context_len

    def reserve(self, wanted: dict[int, int]) -> dict[int, int]:
        """All or nothing per row, in order; rows that need no block are always served."""
        plans, total = {}, 0
        keepers = self._keepers(wanted)
        for row_id, num_new in wanted.items():
            row = self.rows[row_id]
            copy = self._is_tail_shared(row) and num_new > 0 and row_id not in keepers
            end = -(-(row.context_len + num_new) // self.block_size)
            grow = max(end - len(row.blocks), 0) if num_new else 0
            total += grow + copy
            served = total <= len(self.free) or (grow + copy == 0 and row_id not in keepers)
            plans[row_id] = (copy, grow) if served else None
        granted = {}
        for row_id, plan in plans.items():
            granted[row_id] = wanted[row_id] if plan else 0
            if plan:
                self._give(self.rows[row_id], *plan)
        return granted

    def _keepers(self, wanted: dict[int, int]) -> set[int]:
        """Of rows that all write into one shared block and are all its holders, the last."""
        writers: dict[int, list[int]] = {}
        for row_id, num_new in wanted.items():
            if num_new and self._is_tail_shared(self.rows[row_id]):
                writers.setdefault(self._tail(self.rows[row_id]), []).append(row_id)
        return {ids[-1] for block, ids in writers.items() if len(ids) == self.ref[block]}

    def _tail(self, row: Row) -> int:
        return row.blocks[row.context_len // self.block_size]

    def _is_tail_shared(self, row: Row) -> bool:
        return row.context_len % self.block_size != 0 and self.ref[self._tail(row)] > 1

    def _give(self, row: Row, copy: bool, grow: int) -> None:
        if copy:
            column, new, S = row.context_len // self.block_size, self._take(), self.block_size
            old = row.blocks[column]
            for offset in range(S):
                if old * S + offset in self.slots:
                    self.slots[new * S + offset] = self.slots[old * S + offset]
            row.blocks[column] = new
            self.ref[old] -= 1
        row.blocks += [self._take() for _ in range(grow)]

    def write(self, row_id: int, num_new: int) -> None:
        """Writes the KV of the row's next tokens and caches the blocks that became full."""
        row, S = self.rows[row_id], self.block_size
        for position in range(row.context_len, row.context_len + num_new):
            block = row.blocks[position // S]
            assert self.ref[block] == 1, "a shared block is written"
            self.slots[block * S + position % S] = (row.tokens[position], position)
            if position % S == S - 1:
                self.prefix_of[block] = (row.version, *row.tokens[: position + 1])
        row.context_len += num_new

    def fork(self, parent_id: int, child_id: int) -> None:
        self.reseat({child_id: parent_id})

    def reseat(self, parent_of: dict[int, int]) -> None:
        """Each child becomes what its parent was before the call; without a parent it is emptied.

        What a child held is let go after all is shared, so that no block is lost on the way.
        """
        parents = {parent: self.rows.get(parent) for parent in parent_of.values()}
        before = {child: self.rows.pop(child, None) for child in parent_of}
        for child, parent in parent_of.items():
            if row := parents[parent]:
                self.rows[child] = self._copy(row)
        for row in before.values():
            self._let_go(row.blocks if row else [])

    def _copy(self, row: Row) -> Row:
        blocks = row.blocks[: -(-row.context_len // self.block_size)]
        for block in blocks:
            self._hold(block)
        return replace(row, tokens=list(row.tokens), blocks=blocks)

    def release(self, row_id: int) -> Row:
        row = self.rows.pop(row_id)
        self._let_go(row.blocks)
        return row

    def _let_go(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.ref[block] -= 1
            if self.ref[block] == 0:
                self.num_freed += 1
                self.freed_at[block] = self.num_freed
                self.free.insert(len(self.free) if block in self.prefix_of else 0, block)

    def forget_prefixes(self) -> None:
        """Free blocks without a prefix are reused latest freed first, those never used by id."""
        self.prefix_of.clear()
        self.free.sort(key=lambda block: (-self.freed_at[block], block))

    def _take(self) -> int:
        block = self.free.pop(0)
        self.prefix_of.pop(block, None)
        for offset in range(self.block_size):
            self.slots.pop(block * self.block_size + offset, None)
        self.ref[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self.ref[block] == 0:
            self.free.remove(block)
        self.ref[block] += 1
