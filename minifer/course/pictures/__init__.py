"""Pictures and views of single lectures: a data half that is checked, and a half that draws."""
