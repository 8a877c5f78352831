"""One-step augmenting rescue: an admitted token moves to its free second choice, and one without any expert takes its place.

Comes in: queues and the slots after the primary and the rescue pass. Goes out: new slots. Deliberately unknown here: the optional pass.
It is one step of an augmenting path (as in maximum flow; optimum.py follows them to the end), taken greedily, cheapest movers first.

Legend: T tokens, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moetriage.train.fixpoint import fixpoint
from moetriage.train.passes import Choices, Queue


@dataclass(frozen=True)
class Queues:
    """The orders that moving needs.

    first_by_score, first_by_margin: tokens before their first choices. second: before their second ones, those that their first choice
    refused by the score asked with, those that it serves by smallest margin.
    """

    first_by_score: Queue
    first_by_margin: Queue
    second: Queue


@dataclass(frozen=True)
class Slots:
    """Slots granted so far, (T,) int64, -1 for none; and the load of each expert, (E,) int64."""

    first_T: Tensor
    second_T: Tensor
    load_E: Tensor


def augment(choices: Choices, queues: Queues, slots: Slots, capacity: int) -> Slots:
    """Make room for tokens without an expert: at their first choices, then, for those still without, at their second ones.

    Per round, movers are tried from the smallest margin up (then the lowest index). One moves if some token still waits for its expert and
    its second choice has room. Freed places go to the waiting in the order of the score they ask with.
    """
    for waits_at_first in (True, False):
        waiting_T = choices.asks_second_T & (slots.first_T < 0) & (slots.second_T < 0)
        queue = queues.first_by_score if waits_at_first else queues.second
        rank_T, waiting_E = queue.ranks(waiting_T)
        moving_T = _movers(choices, queues, slots, waiting_E, capacity - slots.load_E)
        taken_T, placed_T = _hand_over(queues.first_by_margin, slots.first_T, moving_T, queue.expert_R, rank_T, waiting_T)
        target_rank_T, moved_in_E = queues.second.ranks(moving_T)
        moved_slot_T = slots.load_E.index_select(0, choices.second_T) + target_rank_T
        first_T = torch.where(moving_T, -1, slots.first_T)
        second_T = torch.where(moving_T, moved_slot_T, slots.second_T)
        if waits_at_first:
            first_T = torch.where(placed_T, taken_T, first_T)
        else:
            second_T = torch.where(placed_T, taken_T, second_T)
        slots = Slots(first_T, second_T, slots.load_E + moved_in_E)
    return slots


def _movers(choices: Choices, queues: Queues, slots: Slots, wanted_E: Tensor, room_E: Tensor) -> Tensor:
    """Return who moves, (T,) bool: the greedy choice from the smallest margin up, at most ``wanted_E`` from and ``room_E`` to an expert.

    Rounds instead of a loop over tokens: who is early enough in both queues even if all before it move, moves; who comes after enough sure
    movers in either queue does not. The first undecided token is always decided, so nothing undecided is left when nothing changes.
    """

    def fits(movers_T: Tensor) -> Tensor:
        return queues.first_by_margin.among_first(movers_T, wanted_E) & queues.second.among_first(movers_T, room_E)

    def still_possible(possible_T: Tensor) -> Tensor:
        return possible_T & fits(possible_T & fits(possible_T))

    return fixpoint(still_possible, choices.asks_second_T & (slots.first_T >= 0) & (slots.second_T < 0))


def _hand_over(
    from_queue: Queue, slot_T: Tensor, moving_T: Tensor, waits_at_T: Tensor, rank_T: Tensor, waiting_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Give the place of each expert's n-th mover to the n-th token that waits for it. Returns (slot, whether there is one), each (T,)."""
    freed_rank_T, freed_E = from_queue.ranks(moving_T)
    n_tokens = len(slot_T)
    # An expert's movers fit between its start in the queue and the next one's; whoever stays writes to a cell that is never read.
    cell_T = torch.where(moving_T, from_queue.start_E.index_select(0, from_queue.expert_R) + freed_rank_T, n_tokens)
    freed_slot_T = slot_T.new_zeros(n_tokens + 1).scatter(0, cell_T, slot_T)
    placed_T = waiting_T & (rank_T < freed_E.index_select(0, waits_at_T))
    cell_T = torch.where(placed_T, from_queue.start_E.index_select(0, waits_at_T) + rank_T, n_tokens)
    return freed_slot_T.index_select(0, cell_T), placed_T
