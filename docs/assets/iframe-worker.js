// Browsers start no worker for a page that is read from a folder. There the search runs in a hidden frame of the page, which looks
// like a worker to both sides: messages go to and fro, and importScripts adds scripts one after the other.
if (location.protocol === "file:") {
  const load = (frame, url) =>
    new Promise((resolve, reject) => {
      const script = frame.contentDocument.createElement("script")
      script.src = url
      script.onload = resolve
      script.onerror = () => reject(new Error(`${url} cannot be loaded`))
      frame.contentDocument.body.append(script)
    })

  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.importScripts = async (...urls) => {
        for (const one of urls) await load(this.frame, one)
      }
      this.ready = load(this.frame, new URL(url, location.href).href)
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
