"""A small run of the engine's core, recorded move by move for `draw_paging.py`.

Every move is made by the functions of `jpaged.core`. The model is a toy that knows four sentences,
but it finds the words before the next one in the KV pages, through the block table, as a real one
does.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.admissions import Sampling, make_admissions
from jpaged.core.batch import Batch, Forward, KVCache
from jpaged.core.functional import step_inputs
from jpaged.core.rows import admit, release, reserve
from jpaged.core.sampling import seed_key
from jpaged.core.state import NULL_ROW, EngineState, check_invariants, init_state
from jpaged.core.step import STATUS_NO_BLOCKS, STATUS_OK, decode_window, step
from jpaged.ops.kv_cache import init_layer_kv, write_kv
from jpaged.typing import Array, Float, Params

QUESTION = "tell me in one short line what is"
SENTENCES = (
    f"{QUESTION} rain drops of water from clouds .",
    f"{QUESTION} snow frozen water in flakes .",
    f"{QUESTION} snow soft white ice that melts in spring and fills our rivers .",
    "write a short poem about the sea and the wind that moves it blue waves roll and sing .",
)
PROMPT_LENS = {"rain": 9, "snow": 9, "poem": 13}
RAIN, SNOW, SNOW_2, POEM = 1, 2, 3, 4  # rows
NAMES = {RAIN: "rain", SNOW: "snow", SNOW_2: "snow, second sample", POEM: "poem"}
WORDS = ["", *sorted({word for sentence in SENTENCES for word in sentence.split()})]

NUM_BLOCKS, BLOCK_SIZE, BLOCKS_PER_ROW = 10, 4, 7
MAX_NEW, LONGEST, NUM_STEPS = 12, 14, 4
SEED = 0  # one whose two samples say different things

# ---- the toy model ----


def ids_of(text: str) -> list[int]:
    """Token ids of a text: each word is one."""
    return [WORDS.index(word) for word in text.split()]


def toy_params() -> Params:
    """Logits of the next word after two words: even between those that follow them somewhere."""
    follows = np.full((len(WORDS),) * 3, -100, np.float32)
    for sentence in SENTENCES:
        ids = ids_of(sentence)
        follows[ids[:-2], ids[1:-1], ids[2:]] = 0
    return {"follows": jnp.asarray(follows)}


def toy_hidden(_: Params, batch: Batch, kv: KVCache) -> tuple[Float[Array, "T D"], KVCache]:
    """Writes each word into its slot, then reads the last two words from the row's blocks."""
    word = batch.token_ids.astype(jnp.float32)[:, None, None]
    layer = write_kv(kv[0], word, word, batch.slot_mapping)
    context = layer.k[batch.block_table].reshape(batch.block_table.shape[0], -1)
    at = jnp.maximum(batch.positions[:, None] + jnp.array([[-1, 0]]), 0)
    return context[batch.token_rows[:, None], at], (layer,)


def toy_logits(params: Params, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Looks up the next word after each pair."""
    before, last = hidden.astype(jnp.int32).T
    return params["follows"][before, last]


TOY = Forward(toy_hidden, toy_logits)

# ---- the run ----


@dataclass(frozen=True)
class Scene:
    """A state, and what was done to come to it."""

    title: str
    text: str
    state: EngineState  # of NumPy arrays


class Recorder:
    """Plays moves on a state and keeps a scene of each."""

    def __init__(self):
        self.params = toy_params()
        kv = (init_layer_kv(NUM_BLOCKS, BLOCK_SIZE, 1, 1, "float32", True),)
        self.state = init_state(
            kv,
            num_rows=len(NAMES),
            max_blocks_per_row=BLOCKS_PER_ROW,
            hash_key=jnp.array([1, 2, 3, 4], jnp.uint32),
        )
        self.scenes: list[Scene] = []
        self._admit, self._release = jax.jit(admit), jax.jit(release)
        self._reserve = jax.jit(reserve, static_argnames="max_new")
        self._step = jax.jit(partial(step, forward=TOY, num_tokens=16, num_decode_rows=0))
        self._window = jax.jit(partial(decode_window, forward=TOY, num_steps=NUM_STEPS))

    def keep(self, title: str, text: str) -> None:
        """Ends a scene."""
        check_invariants(self.state)
        self.scenes.append(Scene(title, " ".join(text.split()), jax.device_get(self.state)))

    def words(self, row: int) -> list[int]:
        """Token ids of a row."""
        return self.state.rows.token_ids[row, : self.state.rows.num_tokens[row]].tolist()

    def seat(self, row: int, ids: list[int], prompt_len: int) -> int:
        """Admits a sequence; returns how many of its words were cached."""
        admissions = make_admissions(
            self.state,
            jnp.array([row]),
            jnp.array([ids + [0] * (LONGEST - len(ids))]),
            jnp.array([len(ids)]),
            jnp.asarray(seed_key(SEED))[None],
            max_new_tokens=MAX_NEW,
            sampling=Sampling(temperature=1.0, stop_ids=ids_of(".")),
        )
        admissions = replace(admissions, prompt_len=jnp.array([prompt_len]))
        self.state, num_cached = self._admit(self.state, admissions)
        return int(num_cached[0])

    def read(self, *rows: int, fork: bool = False) -> None:
        """One step; with `fork`, the last row starts as a fork of the row before it."""
        inputs = step_inputs(padded(rows))
        if fork:
            last = len(rows) - 1
            inputs = replace(
                inputs,
                parent=inputs.parent.at[last].set(last - 1),
                sample_index=inputs.sample_index.at[last].set(1),
            )
        self.state, _ = self._step(self.params, self.state, inputs)

    def reserve(self, *rows: int) -> None:
        """Takes the blocks for a window, as the window itself does first."""
        num_new = jnp.full(len(NAMES), NUM_STEPS)
        self.state, _ = self._reserve(self.state, padded(rows), num_new, max_new=16)

    def window(self, *rows: int) -> np.ndarray:
        """Decodes; returns each row's status."""
        self.state, output = self._window(self.params, self.state, padded(rows))
        return np.asarray(output.status[-1, : len(rows)])

    def release(self, *rows: int) -> None:
        """Empties rows."""
        self.state = self._release(self.state, padded(rows))


def padded(rows: tuple[int, ...]) -> Array:
    """A row list of the one width that is compiled."""
    return jnp.array([*rows, *[NULL_ROW] * (len(NAMES) - len(rows))])


def prompt(name: str) -> list[int]:
    """Token ids of a prompt: the first words of the sentences about it."""
    (sentence, *_) = (s for s in SENTENCES if name in s.split())
    return ids_of(sentence)[: PROMPT_LENS[name]]


def tell() -> list[Scene]:
    """The whole story."""
    recorder = Recorder()
    share_a_prefix(recorder)
    copy_on_write(recorder)
    run_out_of_blocks(recorder)
    return recorder.scenes


def share_a_prefix(run: Recorder) -> None:
    """Two prompts that begin alike; the second is read once for two samples."""
    run.keep(
        "An empty pool",
        """The memory for keys and values (KV) is cut into blocks, here of 4 words each. Block 0
        is kept aside as padding; the other 9 are free. Any free block will do for any sequence,
        so memory is never fragmented, and a sequence wastes little more than the rest of its last
        block.""",
    )
    run.seat(RAIN, prompt("rain"), PROMPT_LENS["rain"])
    run.read(RAIN)
    run.keep(
        "A prompt is read",
        """<code>admit</code> seats the prompt in row 1. <code>step</code> takes 3 blocks, notes
        them in the row's <b>block table</b>, writes the KV of 9 words, and draws the next
        word: it is known, but has no KV yet. Full blocks get a key, made of all the words up to
        their end, by which they can be found again.""",
    )
    num_cached = run.seat(SNOW, prompt("snow"), PROMPT_LENS["snow"])
    run.keep(
        "A second prompt begins alike",
        f"""<code>admit</code> finds the first {num_cached} words of the new prompt by the keys
        of their blocks. Row 2's table points at the same blocks 1 and 2, which now count 2
        holders each. Nothing was computed or copied.""",
    )
    run.read(RAIN, SNOW, SNOW_2, fork=True)
    run.keep(
        "One prompt, two samples",
        """<code>step</code> reads what is left of row 2's prompt, while row 1 writes its next
        word. Two samples were asked for (<code>n=2</code>), so <code>fork</code> then copies
        row 2's table into row 3. They share all their blocks, the partly filled block 4 too,
        and each draws a word of its own.""",
    )


def copy_on_write(run: Recorder) -> None:
    """The samples part, and go on for a window."""
    run.read(RAIN, SNOW, SNOW_2)
    run.keep(
        "Copy on write",
        """Rows 2 and 3 must now write different words into the same place of block 4. Before
        they do, <code>reserve</code> copies it for one of them; the last holder keeps the
        original. The full blocks 1 and 2 are never written again, and stay shared for as long
        as they live.""",
    )
    run.reserve(RAIN, SNOW, SNOW_2)
    run.keep(
        "A window reserves ahead",
        f"""<code>decode_window</code> makes several words of each row without asking the host
        in between, here {NUM_STEPS}. So that no step can lack memory, it first reserves all
        that they can need: one more block for each row.""",
    )
    run.window(RAIN, SNOW, SNOW_2)
    run.keep(
        "The window fills them",
        """Each row wrote its words through its own table, and blocks that became full got their
        keys. Rows 1 and 2 drew their full stop inside the window and ended there; row 3 goes
        on.""",
    )
    run.release(RAIN, SNOW)
    run.keep(
        "Finished rows let go",
        """<code>release</code> empties the two tables. Blocks 1 and 2 still have row 3 as a
        holder. The others are free, but full ones stay <b>cached</b>: whoever needs the same
        words finds them. Blocks without a key are reused first, then cached ones, the longest
        unused first.""",
    )


def run_out_of_blocks(run: Recorder) -> None:
    """A prompt evicts, is preempted, and comes back."""
    run.seat(POEM, prompt("poem"), PROMPT_LENS["poem"])
    run.read(SNOW_2, POEM)
    run.keep(
        "A prompt evicts",
        """A new prompt needs 4 blocks. <code>take_blocks</code> gives it the three that hold
        nothing of use, then the least recently used cached one, block 3, whose key is
        forgotten. The row's blocks lie in no order at all: only the table knows it.""",
    )
    status = run.window(SNOW_2, POEM)
    assert status.tolist() == [STATUS_OK, STATUS_NO_BLOCKS]
    run.keep(
        "Not enough for two",
        """For a window both rows need one more block, and only one is left. Row 3 came first, gets
        it and goes on. Row 4 gets nothing and does nothing: <code>decode_window</code>
        reports <code>STATUS_NO_BLOCKS</code> instead of failing.""",
    )
    ids = run.words(POEM)
    run.release(POEM)
    run.keep(
        "Preemption",
        """The host makes room by taking the youngest row off: a <code>release</code> like any
        other, while its words wait in a queue. Its blocks are freed from the tail on, so they
        are also reused from the tail on, and the beginning can be found for longest.""",
    )
    run.window(SNOW_2)
    run.release(SNOW_2)
    num_cached = run.seat(POEM, ids, PROMPT_LENS["poem"])
    run.read(POEM)
    num_left = len(ids) - num_cached
    run.keep(
        "And back again",
        f"""Row 3 has ended and is released. The poem is admitted again, and finds its own blocks:
        {num_cached} of its {len(ids)} words are still there, only {num_left} are computed anew.
        Preemption costs a little time, and changes no word.""",
    )
