// Building elements. Nothing that comes from the network is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

// Replaces the children only when `key` has changed, so that focus and selection survive a poll.
export function refill(node, key, make) {
  const text = JSON.stringify(key);
  if (node.dataset.key === text) return;
  node.dataset.key = text;
  node.replaceChildren(...make());
}

const said = new WeakMap(); // what each child of a `relist` was made of
const FOCUSABLE = "a[href], button";

// One child for each item, which stays for as long as the item says the same. Where one is made
// anew, what had the focus in it has it again.
export function relist(node, items, keyOf, make) {
  const keys = new Set(items.map(keyOf));
  const old = new Map();
  for (const child of [...node.children]) {
    if (keys.has(child.dataset.key)) old.set(child.dataset.key, child);
    else child.remove();
  }
  let next = node.firstElementChild;
  for (const item of items) {
    const text = JSON.stringify(item);
    const before = old.get(keyOf(item));
    let child = before;
    if (!before || said.get(before) !== text) {
      child = make(item);
      child.dataset.key = keyOf(item);
      said.set(child, text);
      if (before) {
        const focused = [...before.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
        if (next === before) next = child;
        before.replaceWith(child);
        if (focused >= 0) child.querySelectorAll(FOCUSABLE)[focused]?.focus({ preventScroll: true });
      }
    }
    if (child === next) next = next.nextElementSibling;
    else node.insertBefore(child, next);
  }
}

// Says nothing where nothing is new: a screen reader may repeat what is set again.
export function tell(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function seconds(value) {
  if (value == null) return "–";
  return value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}

export const count = (value) => (value == null ? "–" : value.toLocaleString("en"));
