"""From hand-edited sources to notebooks: `minifer book build | check | sabotage`."""
