"""Every error krnet raises on purpose: what was found, what was expected, what to do next.

    KrnetError
      InputError            the caller's data or settings are refused (also a ValueError)
        FeatureError  LabelError  SettingError  BudgetError  ResumeError  BusyFolderError
        DataError           images that cannot be learned from
          UnsafePickleError
      FitError              recording started and could not go on
        NonFiniteLossError
      RecordingError        a recording file is damaged, foreign or asked for what it lacks

The command line turns any of them into exit code 1 and its message.
"""


class KrnetError(Exception):
    """Base of all errors of this package."""


class InputError(KrnetError, ValueError):
    """The caller's data or settings are refused."""


class FeatureError(InputError):
    """Features that cannot be recorded: unreadable, wrong type or shape, non-finite."""


class LabelError(InputError):
    """Labels that do not fit the features."""


class DataError(InputError):
    """Images that cannot be learned from: missing, unreadable, of the wrong type or shape."""


class UnsafePickleError(DataError):
    """A pickle that asks for more than arrays and plain values: loading it could run anything."""


class SettingError(InputError):
    """An unknown setting, or a value outside its range."""


class BudgetError(InputError):
    """A recording that is larger than it may be."""

    needed: int = 0
    """Bytes that it would take."""


class ResumeError(InputError):
    """A checkpoint that belongs to other features or settings."""


class BusyFolderError(InputError):
    """A folder that another process is writing to."""


class FitError(KrnetError):
    """Recording started and could not go on."""


class NonFiniteLossError(FitError):
    """The loss became NaN or infinite."""


class RecordingError(KrnetError):
    """Base of everything that can be wrong with a recording file."""


class NotARecordingError(RecordingError):
    """The bytes are not those of a recording: wrong magic, not a file, unreadable header."""


class TruncatedRecordingError(RecordingError):
    """The file is shorter, or longer, than its header says."""


class HeaderTooLargeError(RecordingError):
    """The header claims more bytes than a header may have."""


class NewerVersionError(RecordingError):
    """Written by a later version of the format."""


class ChecksumError(RecordingError):
    """Bytes differ from those that were written."""


class MissingTensorError(RecordingError):
    """A tensor that the settings call for is not in the file."""


class TensorShapeError(RecordingError):
    """A tensor's shape or type is not the one that the settings call for."""


class OversizedRecordingError(RecordingError):
    """Sizes in the header would allocate more than the file's own bytes can justify."""


class ProbeError(RecordingError):
    """The decoded probe samples differ from those decoded when the file was written."""


class FidelityError(RecordingError):
    """Replays are further from the features than the file says."""


class UnknownSampleError(RecordingError, IndexError):
    """A sample ID outside the recording."""


class UnknownRecorderError(RecordingError):
    """The file was written by a recorder that this version does not have."""
