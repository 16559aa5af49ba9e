"""Cached hidden states as data for a draft-head trainer: a dict of tensors for each sequence.

    krnet.open("states.krn") -> CachedStates -> dataset[i] -> {"input_ids": (L,), "hidden_states": (L, ...), ...}

Names and shapes are those that trainers of EAGLE-like heads read from a file a sequence. Nothing here knows how the
states are stored: it takes any recording that was made with lengths, a file or a folder.
"""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import krnet


class CachedStates(Dataset):
    """One sequence an item; a DataLoader with any number of workers may read it."""

    def __init__(self, sequences, input_ids, num_last):
        """
        sequences  recording.sequences: each (L, values), what the model computed for each token
        input_ids  (tokens,): the token IDs of all sequences, one after the other
        num_last   how many of the values, the last ones, are the model's last hidden state
        """
        self.sequences, self.input_ids, self.num_last = sequences, input_ids, num_last

    @classmethod
    def open(cls, path, num_last, device="cpu"):
        """From a recording whose labels are the token IDs."""
        recording = krnet.open(path, device)
        return cls(recording.sequences, recording.labels, num_last)

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        # A DataLoader calls this for a whole batch, whose sequences are decoded at once.
        return [self._item(*pair) for pair in zip(indices, self.sequences[indices])]

    def _item(self, index, states):
        loss_mask = torch.ones(len(states), dtype=torch.long)
        loss_mask[-1:] = 0  # no token follows the last one
        return {
            "input_ids": self.input_ids[self.sequences.ids(index)],
            "loss_mask": loss_mask,
            "hidden_states": states[:, : -self.num_last],
            "verifier_last_hidden_states": states[:, -self.num_last :],
        }


def collate(items):
    """Items of different length -> one dict of tensors (B, longest, ...), filled with zeros."""
    return {name: pad_sequence([item[name] for item in items], batch_first=True) for name in items[0]}
