"""The errors that krnet raises on purpose. Each message says what was found, what was expected, and what to do next.

    KrnetError
      InputError            the caller's data or settings are refused (also a ValueError)
        LabelError  SettingError  BudgetError  ResumeError  RunError  BusyFolderError  RecipeError  UnsafeNetworkError
        MissingPackageError
        StoreError            a file behind a URL cannot be reached, read or written
        RankError             processes of one job: too many for the command, or one of them is missing
        FeatureError
          ChangedFeaturesError
          ShardError        a folder of shards that is damaged, forged or not finished
        DataError           images that cannot be learned from
          UnsafePickleError
      FitError              recording started, but could not continue
        NonFiniteLossError
      RecordingError        a recording file is damaged, is no recording, or lacks what was asked for; subclasses below

The command line prints the message and exits with code 1.
"""


class KrnetWarning(UserWarning):
    """Something that the caller should know, and that stops nothing."""


class KrnetError(Exception):
    """The base class of all errors of this package."""


class InputError(KrnetError, ValueError):
    """The caller's data or settings are refused."""


class FeatureError(InputError):
    """Features cannot be recorded: they are unreadable, non-finite, or have the wrong type or shape."""


class ChangedFeaturesError(FeatureError):
    """A file of features was changed, shortened or replaced while it was in use."""


class ShardError(FeatureError):
    """A shard, or the index of a folder of shards, is damaged, forged, missing, or not finished."""


class MissingPackageError(InputError):
    """An optional package is not installed; the message names the extra that installs it."""


class StoreError(InputError):
    """A file behind a URL cannot be reached, read or written."""


class RankError(InputError):
    """Several processes share a command that cannot be shared, or one of them does not do its share."""


class LabelError(InputError):
    """The labels do not match the features."""


class LengthsError(InputError):
    """Lengths of sequences are missing, are no lengths, or do not add up to the samples."""


class DataError(InputError):
    """Images cannot be learned from: they are missing, unreadable, or have the wrong type or shape."""


class UnsafePickleError(DataError):
    """A pickle holds more than arrays and plain values: loading it could run any code."""


class UnsafeNetworkError(InputError):
    """A file of a network could do more than compute: it was not loaded."""


class SettingError(InputError):
    """A setting is unknown, or its value is outside its range."""


class BudgetError(InputError):
    """A recording is larger than its budget."""

    needed: int = 0
    """Bytes of the recording: the smallest budget that it meets."""


class ResumeError(InputError):
    """A checkpoint, or a finished file, belongs to other features or settings."""


class RunError(InputError):
    """A folder holds no finished run, or not all that its network is rebuilt from."""


class BusyFolderError(InputError):
    """Another process is writing to the folder."""


class RecipeError(InputError):
    """A recipe is missing, or its file holds something that no recipe has."""


class FitError(KrnetError):
    """Recording started, but could not continue."""


class NonFiniteLossError(FitError):
    """The loss became NaN or infinite."""


class RecordingError(KrnetError):
    """The base class of errors about a recording file."""


class NotARecordingError(RecordingError):
    """The path holds no recording: wrong magic, not a file, an unreadable header."""


class TruncatedRecordingError(RecordingError):
    """The file is shorter, or longer, than its header says."""


class HeaderTooLargeError(RecordingError):
    """The header claims more bytes than a header may have."""


class NewerVersionError(RecordingError):
    """The file has a later version of the format."""


class ChecksumError(RecordingError):
    """The bytes do not match their checksum: they differ from those that were written."""


class MissingTensorError(RecordingError):
    """The file lacks a tensor that its settings require."""


class TensorShapeError(RecordingError):
    """A tensor has another shape or type than the settings require."""


class OversizedRecordingError(RecordingError):
    """The header claims sizes that would allocate far more memory than the file has bytes."""


class ProbeError(RecordingError):
    """The decoded probe samples differ from those decoded when the file was written."""


class FidelityError(RecordingError):
    """Replays differ from the features by another error than the file states."""


class UnknownSampleError(RecordingError, IndexError):
    """The recording has no sample with this ID."""


class UnknownRecorderError(RecordingError):
    """The file was written by a recorder that this version of krnet does not have."""
