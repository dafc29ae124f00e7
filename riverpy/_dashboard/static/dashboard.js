// Live updates of the dashboard. Every page also works without this file.
"use strict";

(() => {
  const RETRY_SECONDS = 30;
  // A browser opens about 6 connections to a server, so only the window in use keeps one open.
  const UNFOCUSED_SECONDS = 10;
  const STALE_SECONDS = 20;
  const live = document.getElementById("live");
  const bar = document.getElementById("live-bar");

  // -- ages: the same form as in the server's format_seconds

  const UNITS = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];

  function formatSeconds(seconds) {
    const whole = Math.round(Math.max(seconds, 0));
    for (let i = 0; i < UNITS.length - 1; i += 1) {
      const [unit, length] = UNITS[i];
      const [lower, part] = UNITS[i + 1];
      if (whole >= length) {
        const rest = Math.floor((whole % length) / part);
        return Math.floor(whole / length) + unit + (rest ? rest + lower : "");
      }
    }
    return whole + "s";
  }

  // The clock of this machine may differ from the server's, so ages only grow by what passed here.
  function noteAges(root) {
    const now = Date.now();
    for (const element of root.querySelectorAll("time[data-age]")) {
      element.loadedAt = now;
      element.loadedAge = Number(element.dataset.age);
    }
  }

  function showAges() {
    for (const element of document.querySelectorAll("time[data-age]")) {
      const age = element.loadedAge + (Date.now() - element.loadedAt) / 1000;
      const text = age >= 0 ? formatSeconds(age) + " ago" : "in " + formatSeconds(-age);
      if (element.textContent !== text) element.textContent = text;
    }
  }

  noteAges(document);
  if (!live || !bar || !live.dataset.live || !window.EventSource) return;

  // -- the region: changed elements only, so that focus and open details stay

  function copyAttributes(old, fresh) {
    for (const { name } of [...old.attributes]) {
      const isKept = name === "open" && old.nodeName === "DETAILS";
      if (!fresh.hasAttribute(name) && !isKept) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      const isKept = name === "open" && old.nodeName === "DETAILS";
      if (old.getAttribute(name) !== value && !isKept) old.setAttribute(name, value);
    }
  }

  function updateNode(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    copyAttributes(old, fresh);
    updateChildren(old, fresh);
  }

  function getKey(node) {
    return node.id || (node.getAttribute && node.getAttribute("aria-labelledby")) || "";
  }

  // Without a key, the next element of the same name matches. What stands before it has gone.
  function findMatch(old, fresh) {
    if (fresh.nodeType !== Node.ELEMENT_NODE) return old && old.nodeType === fresh.nodeType ? old : null;
    for (let one = old; one && !getKey(one); one = one.nextSibling) {
      if (one.nodeName === fresh.nodeName) return one;
    }
    return null;
  }

  function updateChildren(oldParent, freshParent) {
    const byKey = new Map();
    for (const child of oldParent.children) if (getKey(child)) byKey.set(getKey(child), child);
    let old = oldParent.firstChild;
    for (const fresh of [...freshParent.childNodes]) {
      const key = getKey(fresh);
      const match = (key ? byKey.get(key) : findMatch(old, fresh)) || null;
      if (!match || match.nodeName !== fresh.nodeName) {
        oldParent.insertBefore(document.importNode(fresh, true), old);
        continue;
      }
      byKey.delete(key);
      if (!key) old = removeUntil(old, match);
      if (match === old) old = old.nextSibling;
      else oldParent.insertBefore(match, old);
      updateNode(match, fresh);
    }
    removeUntil(old, null);
  }

  function removeUntil(first, end) {
    while (first !== end) {
      const next = first.nextSibling;
      first.remove();
      first = next;
    }
    return end;
  }

  // -- the stream

  const text = bar.querySelector("[data-live-text]");
  const announcement = bar.querySelector("[data-live-announcement]");
  const button = bar.querySelector("button");
  let source = null;
  let openTimer = 0;
  let isPaused = false;
  let waiting = null; // the newest content that is held back
  let freshAt = Date.now();
  let problem = "";

  function isHeld() {
    const selection = window.getSelection();
    const isSelecting =
      selection && !selection.isCollapsed && selection.anchorNode && live.contains(selection.anchorNode);
    const field = document.activeElement;
    const isTyping =
      field && field.closest("main") && field.matches("input:not([type=checkbox]), select, textarea");
    // A button must not become another one under the pointer, between the aim and the click.
    const isAiming = live.querySelector("button:hover") !== null;
    return isSelecting || isTyping || isAiming || live.querySelector("input:checked") !== null;
  }

  function apply() {
    if (waiting === null || isPaused || isHeld()) return;
    const parsed = document.createElement("template"); // it loads and runs nothing
    parsed.innerHTML = waiting;
    waiting = null;
    updateChildren(live, parsed.content);
    noteAges(live);
    const titled = live.querySelector("[data-title]");
    if (titled) document.title = titled.dataset.title;
  }

  function announce(words) {
    if (announcement.textContent !== words) announcement.textContent = words;
  }

  function showStatus() {
    const seconds = Math.round((Date.now() - freshAt) / 1000);
    const age = seconds < 5 ? "now" : formatSeconds(seconds) + " ago";
    let state = "";
    if (isPaused) state = "Live updates are paused. ";
    else if (isHeld()) state = "Updates wait while you choose. ";
    else if (problem) state = problem + " ";
    const isOld = seconds >= STALE_SECONDS || Boolean(problem);
    bar.classList.toggle("is-old", isOld && !isPaused);
    text.textContent = state + "Updated " + age + ".";
    announce(isPaused ? "Live updates are paused." : problem);
  }

  function close() {
    window.clearTimeout(openTimer);
    if (source) source.close();
    source = null;
  }

  function openLater(seconds) {
    close();
    openTimer = window.setTimeout(open, seconds * 1000);
  }

  function open() {
    close();
    if (isPaused || document.hidden) return;
    const isOneEvent = !document.hasFocus();
    source = new EventSource(live.dataset.live);
    source.addEventListener("region", (event) => {
      waiting = event.data;
      noteFresh(isOneEvent);
    });
    source.addEventListener("fresh", () => noteFresh(isOneEvent));
    source.addEventListener("problem", (event) => {
      problem = "The newest state cannot be read: " + event.data + ".";
      showStatus();
      if (isOneEvent) openLater(UNFOCUSED_SECONDS);
    });
    source.addEventListener("error", () => {
      problem = "The connection is lost, trying again.";
      if (source && source.readyState === EventSource.CLOSED) {
        problem = "Live updates are refused, trying again in " + RETRY_SECONDS + " s.";
        openLater(RETRY_SECONDS);
      } else if (isOneEvent) openLater(UNFOCUSED_SECONDS);
      showStatus();
    });
  }

  function noteFresh(isOneEvent) {
    freshAt = Date.now();
    problem = "";
    apply();
    showStatus();
    if (isOneEvent) openLater(UNFOCUSED_SECONDS);
  }

  button.addEventListener("click", () => {
    isPaused = !isPaused;
    button.setAttribute("aria-pressed", String(isPaused));
    if (isPaused) close();
    else open();
    showStatus();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("focus", open);
  window.addEventListener("blur", () => {
    if (!isPaused && !document.hidden) openLater(UNFOCUSED_SECONDS);
  });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) open();
  });
  window.setInterval(() => {
    apply();
    showAges();
    showStatus();
  }, 1000);
  bar.hidden = false;
  open();
  showStatus();
})();
