"""Left and right by the names of keypoints, as tools and people write them."""

import pytest

from detection.datasets.coco import PERSON_FLIP_MAP, PERSON_KEYPOINTS, flip_pairs, unpaired


def test_cocos_persons():
    assert flip_pairs(PERSON_KEYPOINTS) == PERSON_FLIP_MAP
    assert unpaired(PERSON_KEYPOINTS, PERSON_FLIP_MAP) == []


@pytest.mark.parametrize(
    "names",
    [
        ("Left_Eye", "Right_Eye"),
        ("LEFT_EYE", "RIGHT_EYE"),
        ("L_Eye", "R_Eye"),
        ("l ankle", "r ankle"),
        ("eye_l", "eye_r"),
        ("Eye.L", "Eye.R"),
        ("leftEye", "rightEye"),
        ("LEye", "REye"),
        ("lefteye", "righteye"),
        ("front-left-paw", "front-right-paw"),
    ],
)
def test_spellings(names):
    assert flip_pairs(("nose", *names)) == (names,)
    assert flip_pairs((names[1], "nose", names[0])) == (names,)


def test_what_has_no_other_side():
    names = ("nose", "tail", "left_eye", "wheel r", "upright")
    assert flip_pairs(names) == ()
    assert unpaired(names, ()) == ["left_eye", "wheel r"]
    assert flip_pairs(("l", "r", "ear")) == ()  # a letter alone is a name
